"""The keeper's part on a GPU, over files in place of its memory: placed once, mapped by a child, checked and written again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines import child as child_module
from engines.cuda import driver as driver_module
from engines.cuda.driver import DriverError
from engines.cuda.region import map_weights
from engines.cuda.testing import FileDriver
from engines.keeper import Keeper
from engines.memory import SharedBuffer, attach
from hotpass.canonical import to_plain
from hotpass.errors import MachineError
from hotpass.records.deployment import ModelRef
from tests.engines.cuda.on_files import keep_on_files

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: ModelRef) -> Iterator[Keeper]:
    keep_on_files(tmp_path, monkeypatch)
    made = Keeper({})
    made.begin_load(tiny_model)
    made.finish_load()
    yield made
    made.close()


def test_a_write_to_the_devices_weights_is_undone_and_told(keeper: Keeper, tmp_path: Path) -> None:
    weights = keeper.place_on("cuda")
    assert set(weights.phases_ms) == {"upload", "checksum"}
    assert keeper.check_device().written == ()
    tensors = map_weights(weights, FileDriver(tmp_path))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors[NORM][:2] = tensors[NORM][:2].flip(0) + 1
    tensors[EMBEDDING][5, 3] = 0.0
    found = keeper.check_device()
    assert set(found.written) == {NORM, EMBEDDING, "lm_head.weight"}
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    assert keeper.check_device().written == ()


def test_the_keepers_sealed_weights_are_the_truth(keeper: Keeper, tmp_path: Path) -> None:
    tensors = map_weights(keeper.place_on("cuda"), FileDriver(tmp_path))
    kept = keeper._weights
    assert kept is not None
    sealed = attach(kept.memory)
    assert tensors.keys() == sealed.keys()
    assert all(torch.equal(tensors[name], sealed[name]) for name in tensors)


def test_what_cannot_be_is_an_error_and_the_keeper_lives(keeper: Keeper) -> None:
    with pytest.raises(MachineError, match="no weights are on a device"):
        keeper.check_device()
    keeper.place_on("cuda")
    with pytest.raises(MachineError, match="on a device already"):
        keeper.place_on("cuda")
    assert keeper.check_device().written == ()


class NotingProgram:
    """Keeps the weights that it is given."""

    def load(self, model: Any, weights: Any, cuts: Any, device: str, threads: int, plan: Any) -> dict[str, float]:
        self.weights = weights
        return {}


def loaded(keeper: Keeper, tiny_model: ModelRef, body: dict[str, Any]) -> tuple[NotingProgram, str]:
    """A program that a child's loop has loaded, and where the child says its weights lie."""
    program, kept, out = NotingProgram(), keeper._weights, SharedBuffer(4)
    assert kept is not None
    server = child_module._Server(None, program)  # type: ignore[arg-type]
    plan = {"rows": [], "steps_per_window": [], "serving_slots": 0, "serving_context": 0, "widths": []}
    whole = {
        "model": to_plain(tiny_model), "index": to_plain(kept.memory.index), "formats": {}, "cuts": [[0]],
        "device": "cuda", "threads": 1, "plan": plan, "epoch": kept.sha256, **body,
    }  # fmt: skip
    fds = (os.dup(kept.memory.fd), os.dup(out.fd))
    server.answer(SimpleNamespace(kind="load", body=whole, fds=fds, blob=b""))  # type: ignore[arg-type]
    origin, _ = server.answer(SimpleNamespace(kind="weights_from", body=None, fds=(), blob=b""))  # type: ignore[arg-type]
    for fd in fds:
        os.close(fd)
    out.close()
    return program, origin


def test_a_child_maps_them_and_copies_nothing(
    keeper: Keeper, tiny_model: ModelRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "CudaDriver", lambda device: FileDriver(tmp_path))
    program, origin = loaded(keeper, tiny_model, {"on_device": to_plain(keeper.place_on("cuda"))})
    assert origin == "the keeper's device memory"
    program.weights[NORM][0] = 100.0
    assert keeper.check_device().written == (NORM,), "it is the keeper's memory that was written to"
    assert program.weights[NORM][0] != 100.0


def test_a_child_that_may_not_map_them_copies_and_says_why(
    keeper: Keeper, tiny_model: ModelRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(device: str) -> FileDriver:
        raise DriverError("cuIpcOpenMemHandle_v2: error 201 (CUDA_ERROR_INVALID_CONTEXT)")

    monkeypatch.setattr(driver_module, "CudaDriver", refused)
    program, origin = loaded(keeper, tiny_model, {"on_device": to_plain(keeper.place_on("cuda"))})
    assert origin.startswith("a copy of this child's own (cuIpcOpenMemHandle_v2: error 201")
    assert program.weights[NORM].shape == (tiny_model.hidden_size,)


def test_on_a_cpu_there_is_no_device(keeper: Keeper, tiny_model: ModelRef) -> None:
    _, origin = loaded(keeper, tiny_model, {"on_device": None})
    assert origin == "sealed memory"
