"""The processes of a vLLM engine: those of every engine, and a second zygote on vLLM's own interpreter.

    keeper, zygote (ours) ─ fork ─► reference child: transformers' modules in fp32, contexts and right answers
    zygote (vLLM's venv)  ─ fork ─► pair child, fresh children: a vLLM engine each, loaded after the fork

So a crash costs a fork and a load, not the import of vLLM. The first child that calibrates becomes the pair child.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from engines.client import Child
from engines.program import KvPlan
from engines.stable import BIRTH_SECONDS, LEAST_DECODE_STEPS, MAX_STEPS, MAX_WINDOW_BYTES, Recipe, Stable
from engines.vllm.environment import vllm_environment
from engines.zygote import Zygote
from hotpass.records.deployment import ModelRef

PROGRAM = "engines.vllm.program:VllmProgram"
IMPORTS = (
    "numpy", "torch", "engines.child", "engines.memory", "engines.prepare.store", "engines.keeper", "vllm", "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "vllm.v1.executor.uniproc_executor", "engines.vllm.program",
)  # fmt: skip
"""What the second zygote imports: everything slow that computes nothing and starts no thread."""
BLOCK_SIZE = 128
"""Tokens of a KV page: vLLM's own default on a CPU."""
SPARE_PAGES = 64


class VllmStable(Stable):
    """Keeper, two zygotes, children."""

    def __init__(self, recipe: Recipe, python: str, arguments: dict[str, object]) -> None:
        """`arguments`: of `vllm.LLM` (`llm_arguments`, and what a person chose)."""
        super().__init__(recipe)
        self._python = python
        self._spare: Child | None = None
        folder = {"TMPDIR": self._environment["TMPDIR"]}
        self._vllm_environment = vllm_environment(recipe.threads, arguments, recipe.search_path) | folder
        try:
            self._vllm = Zygote(self._vllm_environment, python)
        except BaseException:
            super().close()
            raise

    def fresh_child(self, kv: KvPlan | None = None, threads: int | None = None, *, trusted: bool = False) -> Child:
        """A trusted child is the reference's, of our own program; every other one is a vLLM engine. Raises CandidateFailed."""
        spare, self._spare = (None, self._spare) if trusted else (self._spare, None)
        if spare is None:
            return super().fresh_child(kv, threads, trusted=trusted)
        if self._contexts is not None:
            self._contexts.hand_to(spare, time.monotonic() + BIRTH_SECONDS)
        return spare

    def revive_zygote(self) -> None:
        """Whichever died: both are started again."""
        self.discard_pair()
        self._vllm.close()
        self._vllm = Zygote(self._vllm_environment, self._python)
        super().revive_zygote()

    def close(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        super().close()
        self._vllm.close()

    def _home(self, trusted: bool) -> tuple[Zygote, str]:
        return (self.zygote, self.recipe.program) if trusted else (self._vllm, PROGRAM)

    @contextlib.contextmanager
    def _calibrating(self, kv: KvPlan) -> Iterator[Child]:
        """With room for the longest windows, since it becomes the pair child; its pages hold zeros until contexts come."""
        child = self.fresh_child(widest_plan(self.recipe))
        try:
            yield child
        except BaseException:
            child.close()
            raise
        self._spare = child

    def started(self) -> Child:
        """One vLLM without contexts and references, for whoever only looks at its tree. Raises CandidateFailed."""
        self.keeper.begin_load(self.recipe.model)
        self._vllm.prepare(IMPORTS)
        self.weights = self.keeper.finish_load()
        return self.fresh_child(widest_plan(self.recipe))

    def _prepare_zygote(self) -> None:
        super()._prepare_zygote()
        self._vllm.prepare(IMPORTS)


def widest_plan(recipe: Recipe) -> KvPlan:
    """The plan with the longest windows that calibration may choose."""
    vocab = recipe.model.vocab_size
    longest = [
        max(LEAST_DECODE_STEPS, min(MAX_STEPS, MAX_WINDOW_BYTES // (row.num_seqs * vocab * 4))) for row in recipe.rows
    ]
    return KvPlan(
        rows=recipe.rows,
        steps_per_window=tuple(longest),
        serving_slots=recipe.serving_slots,
        serving_context=recipe.serving_context,
    )


def llm_arguments(recipe: Recipe, chunk_tokens: int) -> dict[str, object]:
    """What `vllm.LLM` is told so that every row and every request fits."""
    plan = widest_plan(recipe)
    sequences = max(recipe.serving_slots, *(row.num_seqs for row in recipe.rows))
    tokens = max(chunk_tokens, sequences, *(row.query_tokens for row in recipe.rows))
    return {
        "max_model_len": min(plan.max_context, recipe.model.max_context),
        "max_num_seqs": sequences,
        "max_num_batched_tokens": tokens,
        "kv_cache_memory_bytes": kv_pages(plan) * page_bytes(recipe.model),
        "block_size": BLOCK_SIZE,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "seed": 0,
    }


def kv_pages(plan: KvPlan) -> int:
    """Pages for both sides of every row, for what is served at once, and some to spare."""
    each = -(-plan.max_context // BLOCK_SIZE)
    rows = 2 * sum(row.num_seqs for row in plan.rows)
    return (rows + plan.serving_slots + 2) * each + SPARE_PAGES


def page_bytes(model: ModelRef) -> int:
    """Keys and values of one page over all layers."""
    size = 4 if model.dtype == "float32" else 2
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * BLOCK_SIZE * size
