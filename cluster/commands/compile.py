"""`hotpass compile`: a campaign from the command line, new, resumed or continued."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Any

from cluster.campaign import Running, run_campaign
from cluster.live import make_view
from cluster.plan import Plan, read_plan
from cluster.resolve import resolve
from cluster.spec import CampaignSpec, make_spec
from cluster.summary import print_notes, print_summary
from hotpass.errors import InputError

SPEC_FIELDS = tuple(item.name for item in dataclasses.fields(CampaignSpec))
AGENT_FIELDS = tuple(name for name in SPEC_FIELDS if name == "agents" or name.startswith("llm"))
KEPT_ON_RESUME = ("ray", "address", *AGENT_FIELDS)
"""Where a resumed campaign runs, and who proposes, may differ; what it measures may not."""


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 whatever the verdict: the campaign did what was asked. The last line on stdout is the result."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = resumed(arguments) if arguments.resume else planned(arguments)
    if not arguments.quiet:
        print_notes(plan)
    view = make_view(plan, quiet=arguments.quiet)
    try:
        result = run_campaign(Running(plan=plan, view=view))
    finally:
        view.close()
    if not arguments.quiet:
        print_summary(Path(plan.spec.out))
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return 0


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The spec fields that were set on the command line."""
    return {name: value for name in SPEC_FIELDS if (value := getattr(arguments, name, None)) is not None}


def planned(arguments: argparse.Namespace) -> Plan:
    """A new campaign, in a folder that holds none yet."""
    fields = given(arguments)
    if arguments.continue_from and "model" not in fields:
        fields["model"] = read_plan(Path(arguments.continue_from)).spec.model
    spec = make_spec(fields, arguments.campaign)
    if spec.out and (Path(spec.out) / "campaign.json").exists():
        raise InputError(
            "--out",
            spec.out,
            "holds a campaign already",
            f"resume it with --resume {spec.out}, or choose another folder",
        )
    say = None if arguments.quiet else lambda text: print(f"hotpass · {text}", file=sys.stderr, flush=True)
    return resolve(spec, command=sys.argv, progress=say)


def resumed(arguments: argparse.Namespace) -> Plan:
    """The plan of a folder, run where this command line says. Raises InputError for options that would change what it measures."""
    fields = given(arguments)
    changed = [name for name in fields if name not in KEPT_ON_RESUME]
    if changed or arguments.campaign:
        name = "--" + (changed[0] if changed else "campaign").replace("_", "-")
        raise InputError(
            name,
            fields.get(changed[0]) if changed else arguments.campaign,
            "cannot be given with --resume",
            "a resumed campaign keeps its configuration; start a new one, or use --continue",
        )
    plan = read_plan(Path(arguments.resume))
    kept = {name: fields[name] for name in KEPT_ON_RESUME if name in fields}
    return dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, out=arguments.resume, **kept))
