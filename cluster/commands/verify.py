"""`hotpass verify --reload CANDIDATE`: is it the same on an engine that has run others, and does what was there come back?

Exit 0 when every bit is equal, 1 when not or when the candidate fails. Nothing is timed, and nothing is written to a ledger.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from actors.spec import make_engine
from cluster.commands.try_candidate import deployment_plan
from cluster.machines import engine_spec
from cluster.trying import find_candidate, make_wanted
from engines.program import CandidateFailed
from engines.protocol import Engine, ProvesReloads
from hotpass.decode import json_safe
from hotpass.errors import InputError
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import ReloadProof, Tier


def run(arguments: argparse.Namespace) -> int:
    plan = deployment_plan(arguments)
    candidate = _wanted(arguments, plan.spec.out, plan.deployment.model.dtype)
    before = find_candidate(Path(plan.spec.out), arguments.against)
    engine = make_engine(engine_spec(plan), plan.deployment)
    try:
        proof, failure = _proven(engine, plan.deployment, before, candidate)
    finally:
        engine.close()
    reason = failure if proof is None else proof.reason
    holds = proof is not None and proof.holds
    if not arguments.quiet:
        said = "the reload holds, bit for bit" if holds else f"THE RELOAD DOES NOT HOLD: {reason}"
        print(f"\n  {candidate.label}  after  {before.label}\n  {said}", file=sys.stderr)
    line = {
        "schema": 1,
        "verify": "reload",
        "deployment": plan.deployment.id,
        "candidate": candidate.id,
        "against": before.id,
        "holds": holds,
        "reason": reason,
        "windows": proof.windows if proof else 0,
        "warm_cold_max_abs": proof.warm_cold_max_abs if proof else None,
        "back_max_abs": proof.back_max_abs if proof else None,
        "texts_equal": proof.texts_equal if proof else None,
        "weights_epoch": proof.epoch if proof else None,
    }
    print(json.dumps(json_safe(line), ensure_ascii=False), flush=True)
    return 0 if holds else 1


def _proven(
    engine: Engine, deployment: Deployment, before: Candidate, candidate: Candidate
) -> tuple[ReloadProof | None, str]:
    """The proof, or None and how the candidate failed."""
    if not isinstance(engine, ProvesReloads):
        raise InputError("engine", engine.name, "has no processes to prove a reload in", "use --engine decoder")
    engine.load(deployment, Tier.FAST)
    try:
        return engine.verify_reload(before, candidate), ""
    except CandidateFailed as error:
        return None, f"{error.failure.kind}: {error.failure.message}"


def _wanted(arguments: argparse.Namespace, folder: str, dtype: str) -> Candidate:
    """A path as `try` takes it, or the id (or its beginning) of a candidate of --in."""
    if arguments.campaign_folder and not Path(arguments.reload).exists():
        return find_candidate(Path(folder), arguments.reload)
    return make_wanted(arguments.reload, arguments.settings, arguments.params, dtype)
