"""Models that a vLLM engine cannot serve are refused by name before anything starts; needs no vLLM."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engines.vllm.folder import refuse_unserved
from hotpass.errors import InputError
from hotpass.records.deployment import ModelRef


def configured(model: ModelRef, folder: Path, **changes: object) -> ModelRef:
    """The model with other lines in its configuration."""
    shutil.copytree(model.folder, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return replace(model, folder=str(folder))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has layers of type sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "has layers of type linear_attention"),
        ({"sliding_window": 4096}, "has a sliding window of 4096"),
        ({"kv_lora_rank": 512}, "has latent attention"),
        ({"is_encoder_decoder": True}, "has an encoder"),
    ],
)
def test_what_keeps_no_kv_of_every_position_is_refused_by_name(
    tiny_model: ModelRef, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(InputError, match=rf"LlamaForCausalLM\).*{problem}.*use --engine decoder"):
        refuse_unserved(configured(tiny_model, tmp_path / "model", **changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 4096, "use_sliding_window": False}, {"layer_types": ["full_attention"] * 4}],
)
def test_plain_attention_is_served(tiny_model: ModelRef, tmp_path: Path, changes: dict[str, object]) -> None:
    refuse_unserved(configured(tiny_model, tmp_path / "model", **changes))


def test_a_cut_is_refused(tiny_model: ModelRef) -> None:
    with pytest.raises(InputError, match="is a cut"):
        refuse_unserved(replace(tiny_model, layers=(0, 2)))
