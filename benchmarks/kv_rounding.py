"""What narrower KV caches would cost in accuracy: the largest logit difference that rounding keys and values alone makes.

    python -m benchmarks.kv_rounding [--model smollm2-135m] [--context 1356] [--steps 8]

`cpp-model` with float32 arithmetic reads real text into its cache; then decode steps run twice from copies of that cache, once as it is and once
rounded. The band that the tolerance class is held to is printed beside it (its floor: `Policy.reorder_floor_relative` of the logits' root mean
square; a deployment's own band may be wider). One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import torch

from benchmarks.cpp_side import CppSide
from engines.decoder.batch import build_batch
from engines.prepare import load_tokenizer, prepare_model
from hotpass.traffic.text import TextSource
from verification.policy import Policy

Round = Callable[[torch.Tensor], torch.Tensor]


def cut_to_24_bits(values: torch.Tensor) -> torch.Tensor:
    """float32 without its last byte, to nearest: 16 bits of fraction."""
    bits = values.view(torch.int32)
    rounded: torch.Tensor = ((bits + 0x80) & ~0xFF).view(torch.float32)
    return rounded


def fixed_24_bits(values: torch.Tensor) -> torch.Tensor:
    """Signed 24-bit integers with one scale for the head_dim values of a position and head."""
    scale = values.abs().amax(-1, keepdim=True) / (2**23 - 1)
    return (values / scale.clamp_min(1e-30)).round() * scale


FORMATS: dict[str, Round] = {
    "bfloat16": lambda values: values.bfloat16().float(),
    "float16": lambda values: values.half().float(),
    "float32 cut to 24 bits": cut_to_24_bits,
    "24-bit integers, a scale for each position and head": fixed_24_bits,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=1356)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    model = prepare_model(options.model)
    tokens = TextSource(load_tokenizer(model).encode, seed=0).draw(options.context + options.steps)
    positions = options.context + options.steps
    side = CppSide(model, {"weights_as": "fp32"}, slots=1, positions=positions, threads=2)
    text = torch.tensor([int(token) for token in tokens])
    with torch.inference_mode():
        side.step(build_batch(text[: options.context], contexts=[0], query_lens=[options.context], slots=[0]))
        context = side.kv.read(0, options.context)
        exact = _decoded(side, text[options.context :], context)
        found = {
            name: float((_decoded(side, text[options.context :], rounding(context)) - exact).abs().max())
            for name, rounding in FORMATS.items()
        }
    side.close()
    floor = Policy().reorder_floor_relative * float(exact.square().mean().sqrt())
    for name, difference in found.items():
        print(
            f"kv-rounding · {name}: logits differ by {difference:.2g}; the band is at least {floor:.2g}",
            file=sys.stderr,
        )
    print(json.dumps({"bench": "kv-rounding", "context": options.context, "band_at_least": floor, "max_abs": found}))


def _decoded(side: CppSide, tokens: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Logits [steps, vocab] of tokens after a context."""
    side.kv.write(0, context)
    start = context.shape[3]
    steps = range(len(tokens))
    batches = [build_batch(tokens[i : i + 1], contexts=[start + i], query_lens=[1], slots=[0]) for i in steps]
    return torch.cat([side.step(batch) for batch in batches])


if __name__ == "__main__":
    main()
