"""`hotpass traffic` and `hotpass hardware`: the inputs of a campaign, looked at by themselves."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hotpass.decode import json_safe
from hotpass.settings import DEFAULTS
from hotpass.traffic import read_traffic, shape_table, summarize

if TYPE_CHECKING:
    from rich.console import RenderableType


def traffic(arguments: argparse.Namespace) -> int:
    """Print the summary and the shape table; write a picture with --plot."""
    found = read_traffic(arguments.source, max_context=arguments.max_context, format=arguments.format)
    chunk_tokens = int(str(DEFAULTS["chunk_tokens"]))
    table = shape_table(found, arguments.concurrency, chunk_tokens=chunk_tokens)
    if arguments.plot:
        from hotpass.traffic.render import plot

        plot(found, table, Path(arguments.plot))
    if arguments.json:
        print(json.dumps(json_safe({"traffic": found.ref, "summary": summarize(found), "shapes": table})))
        return 0
    from rich.console import Console

    from hotpass.traffic.render import describe

    Console().print(describe(found, table))
    return 0


def hardware(arguments: argparse.Namespace) -> int:
    """This machine as a deployment would record it, or a named system of the table."""
    from hotpass.hardware.render import describe_machine, describe_system

    if arguments.name:
        from hotpass.hardware import system

        named = system(arguments.name)
        if named.numbers:
            return _show(named, describe_system(named), arguments.json)
    from engines.probe import probe_hardware

    if not arguments.json:
        print("measuring this machine, about ten seconds …", file=sys.stderr, flush=True)
    machine = probe_hardware(device=arguments.name or arguments.device)
    return _show(machine, describe_machine(machine), arguments.json)


def _show(record: object, shown: RenderableType, as_json: bool) -> int:
    from rich.console import Console

    if as_json:
        print(json.dumps(json_safe(record)))
    else:
        Console().print(shown)
    return 0
