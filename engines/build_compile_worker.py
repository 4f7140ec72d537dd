"""The process that compiles a candidate ahead of its engine: `python -m engines.build_compile_worker FOLDER`, ended with it.

    request.json ──► weights of one cut, sealed and mapped as a child has them ──► install, which warms every row up
                 ──► its compilers' folders below FOLDER (`compile_cache`)      └──► reply.json: {"failure": null | Failure}

It runs a candidate's code: it has no network, and can write in its folder only. Whoever starts it sets deadline and limits, and believes
nothing but that there are files.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.confine import confine
from engines.limits import leave_network
from engines.program import Artefacts, CandidateFailed, KvPlan, Program
from hotpass.canonical import to_plain
from hotpass.decode import from_plain
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import ModelRef

if TYPE_CHECKING:
    import torch

    from engines.prepare.store import WeightStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Everything a worker needs; crosses as JSON."""

    program: str
    """`package.module:Class` of the engine's program."""
    candidate: Candidate
    model: ModelRef
    cut: tuple[int, ...]
    plan: KvPlan
    device: str
    threads: int
    native: tuple[Mapping[str, str], ...]
    """One entry a part: library name → path."""
    derived: tuple[Mapping[str, str], ...]
    """One entry a part: concrete slot of the cut → safetensors file."""


def compile_candidate(request: Request) -> None:
    """Install and warm up, so that every graph of the plan's rows is compiled. Raises CandidateFailed."""
    from engines.memory import attach, seal
    from engines.prepare.store import open_weights

    module, _, name = request.program.partition(":")
    program: Program = getattr(importlib.import_module(module), name)()
    store = open_weights(request.model)
    weights = _sealed(store, request.cut if len(request.cut) < request.model.num_layers else None)
    program.load(request.model, weights, [request.cut], request.device, request.threads, request.plan)
    derived = tuple(
        {slot: dict(attach(seal(_tensors(path), "derived"))) for slot, path in slots.items()}
        for slots in request.derived
    )
    program.install("candidate", request.candidate, Artefacts(native=request.native, derived=derived), 0)


def _sealed(store: WeightStore, cut: tuple[int, ...] | None) -> WeightStore:
    """The cut's weights (None: all) under the names of the whole model, mapped read-only from sealed memory, as in an engine's child."""
    from engines.keeper import PACKED
    from engines.memory import attach, seal
    from engines.prepare.store import WeightStore as Store
    from engines.prepare.store import layer_of

    names = [name for name in store if cut is None or layer_of(name) is None or layer_of(name) in cut]
    blocks = {name: found for name in names if (found := store.packed(name)) is not None}
    tensors = {name: store[name] for name in names} | {PACKED + name: held for name, (_, held) in blocks.items()}
    mapped = attach(seal(tensors, "weights"))
    return Store(
        {name: mapped[name] for name in names},
        {name: (kind, mapped[PACKED + name]) for name, (kind, _) in blocks.items()},
    )


def _tensors(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def main() -> None:
    """`python -m engines.build_compile_worker FOLDER`."""
    folder = Path(sys.argv[1])
    leave_network()
    confine(folder)
    request = from_plain(Request, json.loads((folder / "request.json").read_text()))
    failure = None
    try:
        compile_candidate(request)
    except CandidateFailed as error:
        failure = error.failure
    (folder / "reply.json").write_text(json.dumps({"failure": to_plain(failure)}))
    sys.stdout.flush()
    os._exit(0)  # what a candidate left running may not hold the builder up


if __name__ == "__main__":
    main()
