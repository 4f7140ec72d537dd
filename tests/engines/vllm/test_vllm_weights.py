"""Merged names over a checkpoint's own; needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from engines.prepare.store import WeightStore, open_weights
from engines.program import CandidateFailed
from engines.vllm.extension import checked_candidate
from engines.vllm.weights import vllm_module_names, vllm_weights
from hotpass.canonical import to_plain
from hotpass.records.deployment import ModelRef
from tests.engines.vllm.vllm_parts import part


@pytest.fixture(scope="module")
def store(tiny_model: ModelRef) -> WeightStore:
    return open_weights(tiny_model)


def test_a_merged_slot_gets_its_pieces_in_the_order_of_vllms_rows(store: WeightStore) -> None:
    at = "model.layers.1.self_attn."
    merged = vllm_weights(store, at + "qkv_proj")
    assert list(merged) == ["weight"]
    assert torch.equal(merged["weight"], torch.cat([store[f"{at}{name}_proj.weight"] for name in "qkv"]))


def test_a_slot_around_it_has_both_spellings(store: WeightStore) -> None:
    names = set(vllm_weights(store, "model.layers.0"))
    assert {"mlp.gate_up_proj.weight", "mlp.gate_proj.weight", "self_attn.qkv_proj.weight"} <= names
    whole = vllm_weights(store, "model")
    assert "model.layers.3.mlp.gate_up_proj.weight" in whole
    assert whole["lm_head.weight"] is store["lm_head.weight"]


def test_module_names_are_those_of_vllms_tree(store: WeightStore) -> None:
    names = vllm_module_names(store)
    assert names[0] == "model"
    assert "model.layers.0.mlp.gate_up_proj" in names
    assert "model.layers.0.mlp.gate_proj" not in names
    assert len(names) == len(set(names))


def test_sources_other_than_announced_are_refused() -> None:
    """What is compiled is what was hashed."""
    candidate = part("honest", "model.layers.*.mlp", "x", "return self.reference(x)")
    other = part("honest", "model.layers.*.mlp", "x", "return -self.reference(x)")
    order = {
        "candidate": to_plain(candidate),
        "candidate_id": candidate.id,
        "sources": [candidate.parts[0].source.sha256],
    }
    assert checked_candidate(order) == candidate
    with pytest.raises(CandidateFailed, match="not those whose hashes were announced"):
        checked_candidate({**order, "candidate": to_plain(other)})
