"""vLLM on the CPU over the shape points; runs in its own environment, on the prepared Hugging Face folder.

Logits are not exposed by its public interface: log-probabilities of the prompt are compared by the caller instead.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams

from benchmarks.baselines.sweep import Generate, Tuning, reply, request, run_orders

KV_GIB = "1"


class Engines:
    """One engine at a time; a tuning that is already up is used again."""

    def __init__(self, model: str, dtype: str) -> None:
        self._model, self._dtype = model, dtype
        self._tuning: Tuning | None = None
        self.engine: Any = None

    def set_up(self, tuning: Tuning) -> Generate:
        if tuning != self._tuning:
            self.engine = None
            gc.collect()
            self.engine = LLM(
                model=self._model,
                dtype=self._dtype,
                max_model_len=1024,
                max_num_seqs=8,
                enable_prefix_caching=False,
                max_logprobs=-1,
                disable_log_stats=True,
                **tuning,
            )
            self._tuning = tuning
        return self.generate

    def generate(self, tokens: list[list[int]], new_tokens: int) -> None:
        wanted = SamplingParams(
            max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        made = self.engine.generate([{"prompt_token_ids": item} for item in tokens], wanted, use_tqdm=False)
        lengths = {len(item.outputs[0].token_ids) for item in made}
        if lengths != {new_tokens}:
            raise RuntimeError(f"asked for {new_tokens} tokens, got {lengths}")

    def log_probabilities(self, tokens: list[int]) -> np.ndarray:
        """float32 [len(tokens) - 1, vocab]: of every token after each position but the last."""
        wanted = SamplingParams(max_tokens=1, prompt_logprobs=-1, temperature=0, detokenize=False)
        (made,) = self.engine.generate([{"prompt_token_ids": tokens}], wanted, use_tqdm=False)
        rows = made.prompt_logprobs[1:]
        found = np.empty((len(rows), len(rows[0])), dtype=np.float32)
        for index, row in enumerate(rows):
            found[index, list(row)] = [item.logprob for item in row.values()]
        return found


def main() -> None:
    orders = request()
    engines = Engines(orders["model"], orders["dtype"])
    tunings: list[Tuning] = [
        {"enforce_eager": eager, "max_num_batched_tokens": batched, "block_size": block}
        for eager in (False, True)
        for batched, block in ((1024, 128), (1024, 32))
    ]
    run_orders(orders, tunings, engines.set_up)
    facts: dict[str, Any] = {}
    try:
        np.save(orders["logits"], engines.log_probabilities(orders["tokens"]))
        facts["logits_are"] = "log-probabilities"
    except Exception as error:  # the figure is left out with the reason
        facts["no_logits"] = f"{type(error).__name__}: {error}"[:300]
    reply(**facts)


if __name__ == "__main__":
    main()
