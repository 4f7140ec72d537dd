"""The keeper: weights and derived weights in sealed memory, the latter within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engines import keeper as keeper_module
from engines.keeper import Keeper
from engines.memory import attach, sha256_of
from engines.prepare.store import open_weights
from engines.threading_env import process_environment
from hotpass.errors import EngineDied, MachineError
from hotpass.records.deployment import ModelRef
from tests.engines.conftest import open_files


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper(process_environment(1))
    yield made
    made.close()


def test_weights_are_the_files_values_and_their_hash_holds(keeper: Keeper, tiny_model: ModelRef) -> None:
    keeper.begin_load(tiny_model)
    kept = keeper.finish_load()
    tensors = attach(kept.memory)
    store = open_weights(tiny_model)
    assert set(tensors) == set(store)
    assert all(torch.equal(tensors[name], store[name]) for name in store)
    assert tensors["lm_head.weight"].data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()
    assert kept.sha256 == keeper.hash_weights() == sha256_of(kept.memory.fd, kept.memory.index.num_bytes)


def test_derived_weights_are_sealed_once_and_the_oldest_given_back(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.safetensors")
        save_file({"w": torch.full((256,), float(number))}, files[number])
    monkeypatch.setattr(keeper_module, "DERIVED_BYTES", 2048)
    first = keeper.derived({"model.layers.0": files[0]})
    assert keeper.derived({"model.layers.0": files[0]}) is first
    mapped = attach(first)
    assert mapped["model.layers.0/w"].tolist() == [0.0] * 256
    for number in (1, 2):
        keeper.derived({"model.layers.0": files[number]})
    assert keeper.derived_bytes == 2048
    assert keeper.derived({"model.layers.0": files[0]}) is not first
    assert mapped["model.layers.0/w"].tolist() == [0.0] * 256


def test_a_file_that_is_none_is_an_error_and_the_keeper_lives(keeper: Keeper, tmp_path: Path) -> None:
    (tmp_path / "torn").write_bytes(b"not safetensors")
    with pytest.raises(MachineError, match="the keeper"):
        keeper.derived({"model": tmp_path / "torn"})
    with pytest.raises(MachineError, match="no weights are loaded"):
        keeper.hash_weights()
    assert keeper.alive()


def test_a_keeper_that_died_says_what_it_said_last() -> None:
    before = open_files()
    broken = Keeper({**process_environment(1), "PYTHONHOME": "/nowhere"})
    with pytest.raises(EngineDied, match="encodings"):
        broken.hash_weights()
    broken.close()
    assert open_files() <= before
