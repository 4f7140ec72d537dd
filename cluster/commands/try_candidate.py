"""`hotpass try`: one candidate from the command line. Exit 0 faster, 1 slower, incorrect, invalid or failed, 3 inconclusive."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from cluster.campaign import Running
from cluster.commands.compile import KEPT_ON_RESUME, given
from cluster.live import make_view, span
from cluster.plan import Plan, read_plan
from cluster.resolve import resolve
from cluster.spec import make_spec
from cluster.trying import LOADED_NAMES, Tried, find_candidate, make_wanted, try_candidate
from hotpass.decode import json_safe
from hotpass.errors import InputError


def run(arguments: argparse.Namespace) -> int:
    plan = deployment_plan(arguments)
    candidate = make_wanted(arguments.path, arguments.settings, arguments.params, plan.deployment.model.dtype)
    against = find_candidate(Path(plan.spec.out), arguments.against)
    view = make_view(plan, quiet=arguments.quiet)
    try:
        tried = try_candidate(Running(plan=plan, view=view), candidate, against)
    finally:
        view.close()
    if not arguments.quiet:
        explain(tried)
    print(json.dumps(tried_line(tried, plan), ensure_ascii=False), flush=True)
    return tried.exit_code


def deployment_plan(arguments: argparse.Namespace) -> Plan:
    """Of the campaign given by --in, else a new one of what the options say."""
    fields = given(arguments)
    if arguments.campaign_folder:
        changed = [name for name in fields if name not in KEPT_ON_RESUME]
        if changed:
            raise InputError(
                "--" + changed[0].replace("_", "-"),
                fields[changed[0]],
                "cannot be given with --in",
                "the campaign's deployment is used as it is",
            )
        plan = read_plan(Path(arguments.campaign_folder))
        return dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, out=arguments.campaign_folder, **fields))
    if arguments.against not in (None, *LOADED_NAMES) and not Path(arguments.against).is_dir():
        raise InputError(
            "--against", arguments.against, "is a candidate of no campaign", "give the campaign with --in DIR"
        )
    spec = make_spec({**fields, "baselines": False})
    say = None if arguments.quiet else lambda text: print(f"hotpass · {text}", file=sys.stderr, flush=True)
    return resolve(spec, command=sys.argv, progress=say, prefix="try")


def explain(tried: Tried) -> None:
    """For people: what was tried, what came of it and why."""
    out = sys.stderr
    print(f"\n  {tried.candidate.label}  against  {tried.against.label}", file=out)
    print(f"  {tried.verdict.upper()}: {tried.reason}", file=out)
    for attempt in tried.attempts:
        print(f"    {attempt.purpose:<10} {attempt.verdict:<13} {span(attempt.speedup)}", file=out)
    for name, text in tried.gates.items():
        print(f"    gate {name:<18} {text}", file=out)
    print(f"  recorded in {tried.folder}", file=out)


def tried_line(tried: Tried, plan: Plan) -> dict[str, object]:
    """The JSON line that ends a try."""
    last = tried.attempts[-1]
    speedup = last.speedup
    line = {
        "schema": 1,
        "campaign": plan.campaign,
        "deployment": plan.deployment.id,
        "candidate": tried.candidate.id,
        "label": tried.candidate.label,
        "against": tried.against.id,
        "numerics": tried.candidate.numerics,
        "purpose": last.purpose,
        "speedup": {
            "value": round(speedup.value, 4),
            "ci95": [round(speedup.low, 4), round(speedup.high, 4)],
            "kind": speedup.kind,
        }
        if speedup
        else None,
        "tokens_per_s": last.tokens_per_second,
        "gates": tried.gates,
        "verdict": tried.verdict,
        "reason": tried.reason,
    }
    return json_safe(line)  # type: ignore[no-any-return]
