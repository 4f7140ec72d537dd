"""The tiny model is what transformers reads, and the same arguments give the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.prepare.tiny import make_tiny_model
from hotpass.errors import InputError


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first = make_tiny_model(tmp_path / "a", layers=2)
    again = make_tiny_model(tmp_path / "b", layers=2)
    other = make_tiny_model(tmp_path / "c", layers=2, seed=1)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("tie", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_transformers_reads_it_without_missing_weights(tmp_path: Path, tie: bool, dtype: str) -> None:
    folder = make_tiny_model(tmp_path, layers=3, tie=tie, dtype=dtype)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == getattr(torch, dtype)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tie
    with torch.no_grad():
        logits = model(torch.arange(64)[None]).logits
    assert logits.shape == (1, 64, 256)
    assert 1 < logits.float().std() < 4


def test_text_of_n_bytes_has_n_tokens_and_comes_back(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path, layers=1, vocab=300))
    text = "Grüße,\n\tworld \x00 🙂"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    assert max(tokens) < 256
    assert tokenizer.decode(tokens) == text
    assert len(tokenizer) == 300


@pytest.mark.parametrize("sizes", [{"hidden": 66}, {"kv_heads": 3}, {"vocab": 100}, {"dtype": "int8"}])
def test_sizes_that_no_llama_has_are_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(sizes))):
        make_tiny_model(tmp_path, **sizes)  # type: ignore[arg-type]
