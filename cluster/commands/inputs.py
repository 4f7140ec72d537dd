"""`hotpass traffic` and `hotpass hardware`: the inputs of a campaign, looked at by themselves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hotpass.decode import json_safe
from hotpass.settings import DEFAULTS
from hotpass.traffic import read_traffic, shape_table, summarize


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
    if arguments.name:
        from hotpass.hardware import system

        found = json_safe(system(arguments.name))
    else:
        from engines.probe import probe_hardware

        found = json_safe(probe_hardware(device=arguments.device))
    if arguments.json:
        print(json.dumps(found))
        return 0
    from rich.console import Console
    from rich.table import Table

    shown = Table(show_header=False, box=None, padding=(0, 2))
    for key, value in _flat(found):
        shown.add_row(f"[dim]{key}[/dim]", value)
    Console().print(shown)
    return 0


def _flat(plain: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in plain.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows
