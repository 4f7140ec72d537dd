"""Parts that promise the module's own bits, on small or random weights: no wheel is needed for these."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from engines.decoder.source import compile_part
from engines.module.recipes.silero_vad import FRAME, SileroVAD
from hotpass.parts import declaration
from search.catalogue import find_part


def prepared(name: str, module: torch.nn.Module, config: Any = None) -> Any:
    """An instance of a built-in part over the module's weights, as an engine prepares it."""
    source = find_part(name)
    use = declaration(source).bind(source)
    part = compile_part(use).cls()
    weights = part.weights(dict(module.named_parameters()), dict(use.params))
    context = SimpleNamespace(weights=weights, reference=lambda: module.forward, config=config)
    with torch.inference_mode():
        part.prepare(context, dict(use.params))
    return part


def bits(answer: torch.Tensor) -> torch.Tensor:
    return answer.contiguous().view(torch.int32)


@pytest.mark.parametrize("batch", [1, 3])
def test_frames_by_stage_have_the_bits_of_frame_after_frame(batch: int) -> None:
    torch.manual_seed(1)
    model = SileroVAD().eval().requires_grad_(False)
    part = prepared("silero-stages", model)
    with torch.inference_mode():
        for frames in (2, 5):
            audio = 0.3 * torch.randn(batch, frames * FRAME)
            assert torch.equal(bits(part.forward(audio)), bits(model(audio)))
    assert len(part.recorded) == 2
    part.close()
    assert not part.recorded


def test_a_stage_that_no_call_at_once_keeps_goes_frame_by_frame() -> None:
    """Calls that give other bits for many frames than for one: the choice falls back to one by one."""
    model = SileroVAD().eval().requires_grad_(False)
    part = prepared("silero-stages", model)
    namespace = part.forward.__func__.__globals__
    usual = namespace["_linears"]
    namespace["_linears"] = lambda *given: [lambda x, call=call: call(x) * len(x) for call in usual(*given)]
    with torch.inference_mode():
        chosen = part._chosen(torch.randn(1, 4 * FRAME))
    assert chosen["gates"] == (0, False)
    assert chosen["conv1"][1], "the other stages are as they were"


def test_what_was_recorded_keeps_no_weights() -> None:
    """torch keeps what it traced for good: with the weights in it, a candidate that is taken off would leave their memory mapped."""
    torch.manual_seed(1)
    model = SileroVAD().eval().requires_grad_(False)
    part = prepared("silero-stages", model)
    part.w = {name: tensor.detach().clone() for name, tensor in part.w.items()}
    left = [weakref.ref(tensor) for tensor in part.w.values()]
    with torch.inference_mode():
        part.forward(torch.randn(1, 2 * FRAME))
    part.close()
    gc.collect()
    assert not any(tensor() is not None for tensor in left)


CONFIG = BertConfig(
    vocab_size=30, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, max_position_embeddings=40
)  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "boolean", "numbers"])
def test_an_encoder_in_place_has_the_encoders_bits(kind: str) -> None:
    torch.manual_seed(2)
    encoder = BertModel(CONFIG).eval().requires_grad_(False).encoder
    part = prepared("bert-encoder", encoder, CONFIG)
    seen = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    seen[1, :, :, 6:] = False
    mask = {"none": None, "boolean": seen, "numbers": torch.zeros(2, 1, 9, 9).masked_fill(~seen, -1e9)}[kind]
    with torch.inference_mode():
        answers = []
        for _ in range(2):
            x = torch.randn(2, 9, 64)
            kept = x.clone()
            answers.append((part.forward(x, mask).last_hidden_state, encoder(x, mask).last_hidden_state))
            assert torch.equal(x, kept), "what is handed in is not written to"
    for mine, theirs in answers:  # the first answer is not overwritten by the second call
        assert torch.equal(bits(mine), bits(theirs))


def test_what_the_encoder_part_does_not_know_is_refused() -> None:
    encoder = BertModel(CONFIG).encoder
    with pytest.raises(ValueError, match="hidden_act='gelu' only"):
        prepared("bert-encoder", encoder, SimpleNamespace(**{**CONFIG.to_dict(), "hidden_act": "relu"}))
    part = prepared("bert-encoder", encoder.requires_grad_(False), CONFIG)
    with pytest.raises(ValueError, match="neither a cache nor cross attention"):
        part.forward(torch.randn(1, 3, 64), use_cache=True)
