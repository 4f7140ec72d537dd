"""The process that runs a part's `weights`: `python -m engines.build_worker FOLDER`, started for one part, ended with it.

    request.json ──► part compiled, weights mapped ──weights(w, params)──► <n>.safetensors, one a job
                                                                    └────► reply.json: {"failure": null | Failure}

It runs a candidate's code: whoever starts it sets the deadline, and believes only that the files hold plain tensors.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engines.decoder.source import CompiledPart, compile_part, derive, failed
from engines.limits import leave_network
from engines.prepare.store import WeightStore, open_weights
from engines.program import CandidateFailed
from engines.vllm.weights import vllm_weights
from hotpass.canonical import to_plain
from hotpass.decode import from_plain
from hotpass.records.candidate import PartUse
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import FailureKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Derived weights of one slot."""

    slot: str
    """In the names of the model, as `model.layers.12.mlp`; `model` is the whole of `layers`."""
    layers: tuple[int, ...] | None
    """Of the cut that slot `model` is of; None for the whole model and for every other slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Everything a worker needs; crosses as JSON."""

    use: PartUse
    model: ModelRef
    jobs: tuple[Job, ...]
    threads: int


def weights_of(store: WeightStore, job: Job, engine: str = "decoder") -> WeightStore:
    """What the part's `weights` gets for a job: by the names of its engine's tree."""
    cut = store.cut(job.layers)
    return vllm_weights(cut, job.slot) if engine == "vllm" else cut.restricted(job.slot)


def derive_all(request: Request, folder: Path) -> None:
    """Write `<n>.safetensors` for job n. Raises CandidateFailed."""
    torch.set_num_threads(request.threads)
    part = compile_part(request.use)
    store = open_weights(request.model)
    for index, job in enumerate(request.jobs):
        save_file(_plain(part, job.slot, weights_of(store, job, part.declared.engine)), folder / f"{index}.safetensors")


def _plain(part: CompiledPart, slot: str, weights: WeightStore) -> dict[str, torch.Tensor]:
    """The derived tensors as plain contiguous CPU tensors, each with memory of its own. Raises CandidateFailed."""
    versions = {name: tensor._version for name, tensor in weights.items()}
    made = derive(part, weights)
    _check_untouched(part.name, slot, weights, versions)
    for name, tensor in made.items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            kind = type(tensor).__name__
            raise failed(
                FailureKind.BUILD, f"part {part.name}: weights() gives {name} of {slot} as {kind}, not a plain tensor"
            )
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for name, tensor in made.items()}


def _check_untouched(part: str, slot: str, weights: WeightStore, versions: Mapping[str, int]) -> None:
    """Written inputs would be another part's or slot's inputs, too: the result would depend on the order of work."""
    for name, version in versions.items():
        if weights[name]._version != version:
            raise failed(FailureKind.BUILD, f"part {part}: weights() writes into {name} of {slot}; copy it first")


def main() -> None:
    """`python -m engines.build_worker FOLDER`."""
    folder = Path(sys.argv[1])
    leave_network()
    request = from_plain(Request, json.loads((folder / "request.json").read_text()))
    failure = None
    try:
        derive_all(request, folder)
    except CandidateFailed as error:
        failure = error.failure
    except SafetensorError as error:
        if "No space left" in str(error):
            sys.exit(errno.ENOSPC)
        failure = failed(
            FailureKind.BUILD, f"part {request.use.source.name}: derived weights cannot be kept: {error}"
        ).failure
    (folder / "reply.json").write_text(json.dumps({"failure": to_plain(failure)}))


if __name__ == "__main__":
    main()
