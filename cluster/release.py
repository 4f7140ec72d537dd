"""The release of a winner: its sources, its evidence, how to serve it and how to switch it off, in one folder that stands alone.

release/candidate.toml, parts/…     the candidate, verified by its id when read
release/evidence.json               deployment, cold attempt, gates, claims, environment: what was measured, and on what
release/RELEASE.md                  the same for people
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from actors.slots import reference_sources
from cluster.plan import Plan
from cluster.state import CampaignState
from cluster.store import load_candidate
from hotpass.decode import json_safe
from hotpass.parts import declaration
from hotpass.records.candidate import Candidate

FOLDER = "release"
REFERENCES = "reference"
"""Folder of the campaign with the reference source of the slots that its winner claims."""


def write_release(folder: Path, plan: Plan, state: CampaignState) -> Path:
    """The folder of the winner, whole or not at all. Only called when there is one."""
    assert state.winner is not None
    assert state.result is not None
    candidate = load_candidate(folder, state.winner["candidate_id"])
    target, temporary = folder / FOLDER, folder / f".{FOLDER}"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(folder / "candidates" / candidate.id, temporary)
    evidence = evidence_of(plan, state)
    (temporary / "evidence.json").write_text(
        json.dumps(evidence, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (temporary / "RELEASE.md").write_text(_text(candidate, plan, state), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    if plan.spec.engine != "fake" and candidate.parts:
        write_references(folder, plan, candidate)
    return target


def write_references(folder: Path, plan: Plan, candidate: Candidate) -> None:
    """The reference source of every slot that the candidate's parts claim, for the report's diff."""
    declared = [declaration(use.source) for use in candidate.parts]
    claims = {claim: item.replaces for item in declared for claim in sorted(item.claims)}
    target = folder / REFERENCES
    target.mkdir(exist_ok=True)
    for claim, text in reference_sources(plan.deployment.model, claims).items():
        (target / reference_name(claim)).write_text(text, encoding="utf-8")


def reference_name(claim: str) -> str:
    """File name of a claim: `model.layers.*.mlp` is `model.layers._.mlp.py`."""
    return f"{claim.replace('*', '_')}.py"


def evidence_of(plan: Plan, state: CampaignState) -> dict[str, Any]:
    """What the claim rests on, as plain values."""
    assert state.winner is not None
    row = next(row for row in state.attempts if row.seq == state.winner["attempt_seq"])
    measured = state.results.get(row.assignment, {})
    plain: dict[str, Any] = json_safe(
        {
            "schema": 1,
            "campaign": plan.campaign,
            "deployment": plan.deployment,
            "attempt": row.attempt,
            "gates": state.winner["gates"],
            "claims": state.winner["claims"],
            "environment": measured.get("environment", {}),
            "checks": measured.get("checks", []),
            "versions": plan.versions,
        }
    )
    return plain


def _deployment(plan: Plan) -> str:
    """Options that name the deployment again."""
    if plan.spec.engine == "module":
        return f"--engine module --model {plan.spec.model} --numerics {plan.spec.numerics}"
    return f"--model {plan.spec.model} --traffic {plan.spec.traffic}"


def _text(candidate: Candidate, plan: Plan, state: CampaignState) -> str:
    assert state.result is not None
    best = state.result["best"]
    claim = best["speedup_vs_loaded"]
    parts = "\n".join(f"- part `{use.source.name}` {dict(use.params) or ''}".rstrip() for use in candidate.parts)
    settings = "\n".join(f"- setting `{name} = {value}`" for name, value in candidate.settings.items())
    gates = "\n".join(f"- {name}: {text}" for name, text in state.result["gates"].items())
    return f"""# {candidate.label}

{claim["value"]:.2f} x [{claim["ci95"][0]:.2f}, {claim["ci95"][1]:.2f}] over {claim["baseline"]} ({best["kind"]}, cold), numerics class {candidate.numerics},
for {plan.deployment.model.name} under {plan.deployment.traffic.name} on {plan.deployment.hardware.name}.

{parts}
{settings}

Gates:

{gates}

## Measure it again

    hotpass try . {_deployment(plan)}

## Switch it off

Every part runs only inside its declared domain and only while it is installed; take the candidate out of the engine's
configuration (or start the engine without this folder) and the model runs as loaded. Nothing in the model's own files was changed.

## It no longer holds when

the weights (`{plan.deployment.model.weights_hash[:16]}`), the hardware or the library versions in `evidence.json` are others. Then measure again.
"""
