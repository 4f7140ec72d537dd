"""transformers' own modules, compiled, over the shape points: static cache, `logits_to_keep=1`, greedy; in the project's environment.

`compiled: False` is the same loop eager, so that what compiling gains can be read off the sweep.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StaticCache

from benchmarks.baselines.sweep import Generate, Tuning, reply, request, run_orders

CACHE_TOKENS = 576
"""Positions of the static cache: the longest prompt and what follows it, rounded up to 64."""


class Loop:
    """One model, and its forward eager and compiled."""

    def __init__(self, model: str, dtype: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._model.eval()
        self._forwards: dict[str, Any] = {"none": self._model.forward}
        self._caches: dict[int, StaticCache] = {}

    def set_up(self, tuning: Tuning) -> Generate:
        torch.set_num_threads(tuning["threads"])
        mode = tuning["compile_mode"]
        if mode not in self._forwards:
            self._forwards[mode] = torch.compile(self._model.forward, mode=mode, dynamic=False)
        forward = self._forwards[mode]

        @torch.inference_mode()
        def generate(tokens: list[list[int]], new_tokens: int) -> None:
            ids = torch.tensor(tokens)
            cache = self._cache(len(tokens))
            cache.reset()
            positions = torch.arange(ids.shape[1])
            for _ in range(new_tokens):
                logits = forward(
                    input_ids=ids, past_key_values=cache, position_ids=positions[None], use_cache=True, logits_to_keep=1
                ).logits
                ids = logits[:, -1:].argmax(-1)
                positions = positions[-1:] + 1

        return generate

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32 [len(tokens), vocab]."""
        found: np.ndarray = self._model(input_ids=torch.tensor([tokens])).logits[0].float().numpy()
        return found

    def _cache(self, num_seqs: int) -> StaticCache:
        if num_seqs not in self._caches:
            self._caches[num_seqs] = StaticCache(config=self._model.config, max_cache_len=CACHE_TOKENS)
        return self._caches[num_seqs]


def main() -> None:
    orders = request()
    loop = Loop(orders["model"], orders["dtype"])
    tunings: list[Tuning] = [
        {"threads": threads, "compile_mode": mode}
        for mode, threads in itertools.product(("default", "none"), orders["threads"])
    ]
    run_orders(orders, tunings, loop.set_up)
    np.save(orders["logits"], loop.logits(orders["tokens"]))
    reply()


if __name__ == "__main__":
    main()
