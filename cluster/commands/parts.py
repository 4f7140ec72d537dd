"""`hotpass slots` and `hotpass init-part`: what can be replaced in a model, and a part to start from."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from actors.slots import concrete_slot, open_program, vllm_part_template, vllm_slots
from cluster.spec import one_of
from hotpass.errors import InputError
from hotpass.records.deployment import ModelRef
from hotpass.records.slots import Slot, SlotTable

LOADS = {"decoder": "--traffic chat", "module": "--engine module", "vllm": "--engine vllm --traffic chat"}
"""What `hotpass try` is told beside a part and a model."""


def slots(arguments: argparse.Namespace) -> int:
    model = _model(arguments)
    table = vllm_slots(model) if arguments.engine == "vllm" else open_program(model).slots()
    if arguments.json:
        rows = [
            {
                "name": slot.name,
                "stands_for": slot.stands_for,
                "signature": slot.signature,
                "reference_sha256": slot.reference_sha256,
                "lowest_tier": slot.lowest_tier.value,
            }
            for slot in table.slots
        ]
        print(json.dumps({"engine": table.engine, "version": table.version, "slots": rows}))
        return 0
    print(table.version)
    for claim, slot, count in by_claim(table):
        layers = f" · {count} layers" if count > 1 else ""
        print(
            f"\n{claim}\n    {slot.stands_for}{layers} · judged by the {slot.lowest_tier} tier\n    forward{slot.signature}"
        )
    return 0


def by_claim(table: SlotTable) -> list[tuple[str, Slot, int]]:
    """Slots that differ only in their layer as one row: (claim pattern, one of them, how many)."""
    groups: dict[tuple[str, str], list[Slot]] = {}
    for slot in table.slots:
        groups.setdefault((re.sub(r"\.\d+(?=\.|$)", ".*", slot.name), slot.stands_for), []).append(slot)
    return [(claim if len(group) > 1 else group[0].name, group[0], len(group)) for (claim, _), group in groups.items()]


def init_part(arguments: argparse.Namespace) -> int:
    """Write `part.py` into a new folder and print its path."""
    folder = Path(arguments.out or re.sub(r"[^A-Za-z0-9]+", "-", arguments.slot).strip("-"))
    target = folder / "part.py"
    if target.exists():
        raise InputError("--out", folder, "has a part.py already", "choose another folder")
    model = _model(arguments)
    if arguments.engine == "vllm":
        text = vllm_part_template(model, arguments.slot)
    else:
        program = open_program(model)
        text = program.part_template(concrete_slot(program, arguments.slot))
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    load = LOADS[arguments.engine]
    print(f"try it with: hotpass try {folder} --model {arguments.model} {load}", file=sys.stderr)
    print(target)
    return 0


def _model(arguments: argparse.Namespace) -> ModelRef:
    """Prepared as the engine that is asked for serves it. Raises InputError."""

    def say(text: str) -> None:
        print(f"hotpass · {text}", file=sys.stderr, flush=True)

    if one_of("--engine", arguments.engine, ["decoder", "module", "vllm"]) == "module":
        from engines.module.prepare import prepare_module

        return prepare_module(arguments.model, progress=say)
    from engines.prepare.model import prepare_model

    return prepare_model(arguments.model, progress=say)
