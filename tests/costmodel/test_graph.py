"""The graph's counts agree with what is published for each architecture, and what is unknown is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from costmodel.graph import Role, graph_of
from hotpass.errors import InputError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def published(folder: Path) -> dict[str, list[str]]:
    """Model → cells of the README's table."""
    rows = {}
    for line in (folder / "model_configs" / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 10 and "/" in cells[0] and re.fullmatch(r"[\d.]+", cells[1]):
            rows[cells[0]] = cells
    return rows


@pytest.mark.data
def test_every_published_architecture_within_three_percent(data_folder: Path) -> None:
    rows = published(data_folder)
    assert len(rows) == 28
    off = []
    for model, cells in rows.items():
        path = data_folder / "model_configs" / f"{model.replace('/', '--')}.config.json"
        graph = graph_of(json.loads(path.read_text()), model)
        kv_mb = [float(value) for value in cells[8].split("/")]
        pairs = {
            "total B": (graph.params / 1e9, float(cells[1])),
            "active B": (graph.active_params / 1e9, float(cells[2])),
            "KV 4k": (graph.kv_bytes(4096) / 1e6, kv_mb[0]),
            "KV 32k": (graph.kv_bytes(32768) / 1e6, kv_mb[1]),
            "KV 128k": (graph.kv_bytes(131072) / 1e6, kv_mb[2]),
            "kB/token": (graph.kv_bytes_per_token(131072) / 1e3, float(cells[9])),
        }
        off += [
            f"{model} {what}: {got:.3f} for {want}" for what, (got, want) in pairs.items() if abs(got / want - 1) > 0.03
        ]
    assert off == []


def test_a_small_llama_by_hand() -> None:
    graph = graph_of(LLAMA, "smollm2")
    layer = 576 * (9 + 3 + 3) * 64 + 576 * 576 + 3 * 576 * 1536
    assert graph.params == 30 * layer + 49152 * 576
    assert graph.active_params == graph.params  # tied: the head reads what the embedding holds
    assert graph.kv_bytes(256) == 256 * 30 * 2 * 3 * 64 * 2
    assert graph.kv_bytes(256, kv_bytes=4.0) == 2 * graph.kv_bytes(256)
    assert graph.layers == ((30, graph.layers[0][1]),)


def test_a_window_caps_cache_and_reads() -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 128}
    graph = graph_of(config)
    assert graph.kv_bytes(4096) == graph.kv_bytes(128)
    attention = graph.layers[0][1].attention
    assert attention is not None
    assert attention.read_bytes(4096) == attention.read_bytes(128)


def test_experts_count_whole_and_active() -> None:
    config = {
        **LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    graph = graph_of(config)
    routed = [m for m in graph.layers[0][1].matrices if m.role in (Role.EXPERT_GATE_UP, Role.EXPERT_DOWN)]
    assert sum(m.params for m in routed) == 8 * 3 * 576 * 64
    assert sum(m.active_params for m in routed) == 2 * 3 * 576 * 64


def test_quantised_formats_weigh_less() -> None:
    plain = graph_of(LLAMA)
    fp8 = graph_of({**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    inner = plain.params - 49152 * 576
    assert plain.weight_bytes() == 2 * plain.params
    assert fp8.weight_bytes() == pytest.approx(2 * 49152 * 576 + inner * (1 + 4 / 16384))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "rwkv7"}, "rwkv7"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": -9}, "positive"),
        ({"num_key_value_heads": 4}, "divide"),
        ({"quantization_config": {"quant_method": "exl9"}}, "exl9"),
    ],
)
def test_what_cannot_be_known_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        graph_of({**LLAMA, **change})


def test_contradicting_layer_counts_are_refused() -> None:
    config = {
        **LLAMA, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128,
        "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    with pytest.raises(InputError, match="contradicts the 2 layers"):
        graph_of(config)
