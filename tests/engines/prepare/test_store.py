"""A weight store renames views; it never copies."""

from __future__ import annotations

import pytest
import torch

from engines.prepare.store import WeightStore, layer_of, with_layer


@pytest.fixture
def store() -> WeightStore:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names += [f"model.layers.{layer}.{name}.weight" for layer in range(12) for name in ("mlp.up_proj", "norm")]
    tensors = {name: torch.full((2, 32), float(index)) for index, name in enumerate(names)}
    packed = {"model.layers.10.mlp.up_proj.weight": ("Q4_1", torch.zeros(2, 20, dtype=torch.uint8))}
    return WeightStore(tensors, packed)


def test_a_slot_sees_its_own_names(store: WeightStore) -> None:
    slot = store.restricted("model.layers.1.mlp")
    assert list(slot) == ["up_proj.weight"]  # and not layer 10's or 11's
    assert slot["up_proj.weight"] is store["model.layers.1.mlp.up_proj.weight"]
    assert slot.packed("up_proj.weight") is None
    assert store.restricted("model.layers.10.mlp").packed("up_proj.weight") is not None
    assert list(store.restricted("lm_head")) == ["weight"]
    assert set(store.restricted("model")) == set(store)
    assert len(store.restricted("model.layers.1.ml")) == 0


def test_a_cut_renumbers_layers_and_keeps_the_rest(store: WeightStore) -> None:
    cut = store.cut((10, 2))
    assert cut["model.layers.0.norm.weight"] is store["model.layers.10.norm.weight"]
    assert cut["model.layers.1.norm.weight"] is store["model.layers.2.norm.weight"]
    assert "model.layers.2.norm.weight" not in cut
    assert "lm_head.weight" in cut
    assert len(cut) == 3 + 2 * 2
    assert cut.packed_names() == ("model.layers.0.mlp.up_proj.weight",)
    assert store.cut(None) is store


def test_blocks_need_values() -> None:
    with pytest.raises(ValueError, match="ghost"):
        WeightStore({}, {"ghost": ("Q4_1", torch.zeros(1, 20, dtype=torch.uint8))})


def test_layer_numbers_are_read_and_written() -> None:
    assert layer_of("model.layers.12.mlp.3.weight") == 12
    assert layer_of("lm_head.weight") is None
    assert with_layer("model.layers.12.mlp.3.weight", 0) == "model.layers.0.mlp.3.weight"
