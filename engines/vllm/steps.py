"""Steps of chosen shape through vLLM's own model runner and sampler, with logits and the KV pages in our hands.

    sequences (pages, context, tokens) ── SchedulerOutput by hand ──► executor.execute_model ──► logits ──► sample_tokens

A sequence is a prompt whose first `context` tokens count as computed; each step schedules the next tokens of it. So a decode step is
teacher-forced, and what runs is what vLLM runs for a request of that length. Pages come out of the scheduler's own pool and go back
to it; whole requests go through the scheduler instead (`engines.vllm.serving`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

_serial = itertools.count()


class Pages:
    """KV pages taken from the scheduler's pool, so that no request gets them."""

    def __init__(self, core: Any) -> None:
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self.block_size = int(core.scheduler.block_size)

    def take(self, tokens: int) -> list[Any]:
        """Pages for so many tokens."""
        blocks: list[Any] = self._pool.get_new_blocks(max(1, -(-tokens // self.block_size)))
        return blocks

    def give_back(self, blocks: Sequence[Any]) -> None:
        self._pool.free_blocks(blocks)

    def slot_mapping(self, blocks: Sequence[Any], count: int) -> torch.Tensor:
        """int64 [count]: where positions 0, 1, … of those pages lie in a layer's cache."""
        ids = torch.tensor([block.block_id for block in blocks], dtype=torch.int64)
        positions = torch.arange(count)
        return ids[positions // self.block_size] * self.block_size + positions % self.block_size


class Sequences:
    """Sequences that are stepped together. Use it as a context manager: at the end vLLM forgets them."""

    def __init__(
        self,
        core: Any,
        pages: Sequence[Sequence[Any]],
        contexts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """For each sequence its pages, how many positions of them count as computed, and the tokens that follow those."""
        self._core = core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._names = [f"hotpass-{next(_serial)}" for _ in tokens]
        self._computed = list(contexts)
        self._new: list[NewRequestData] = [
            NewRequestData(
                req_id=name,
                # What stands in the context is never read: its keys and values are in the pages already.
                prompt_token_ids=[0] * context + list(own),
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
                pooling_params=None,
                block_ids=([block.block_id for block in blocks],),
                num_computed_tokens=context,
                lora_request=None,
            )
            for name, blocks, context, own in zip(self._names, pages, contexts, tokens, strict=True)
        ]

    def __enter__(self) -> Sequences:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.execute_model_state = None  # a step that raised left its state
        done = SchedulerOutput.make_empty()
        done.finished_req_ids = set(self._names)
        self._core.model_executor.execute_model(done)

    def step(self, counts: Sequence[int]) -> torch.Tensor:
        """The next `counts[i]` tokens of sequence i; logits [num_seqs, vocab] after the last of each, a view until the next step."""
        executor = self._core.model_executor
        executor.execute_model(self._scheduled(counts))
        logits: torch.Tensor = self._runner.execute_model_state.logits
        executor.sample_tokens(None)
        self._computed = [done + count for done, count in zip(self._computed, counts, strict=True)]
        order = [self._runner.input_batch.req_id_to_index[name] for name in self._names]
        return logits if order == list(range(len(order))) else logits[order]

    def _scheduled(self, counts: Sequence[int]) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        if self._new:
            output.scheduled_new_reqs, self._new = self._new, []
        else:
            output.scheduled_cached_reqs = CachedRequestData(
                req_ids=list(self._names),
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None] * len(self._names),
                num_computed_tokens=list(self._computed),
                num_output_tokens=[0] * len(self._names),
            )
        output.num_scheduled_tokens = dict(zip(self._names, counts, strict=True))
        output.total_num_scheduled_tokens = sum(counts)
        return output


def write_kv(core: Any, pages: Pages, blocks: Sequence[Any], context: torch.Tensor) -> None:
    """Keys and values float32 [layers, 2, kv_heads, positions, head_dim], rotary applied, into pages of every layer."""
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = attention_layers(runner)
    if len(layers) != context.shape[0]:
        raise ValueError(f"{context.shape[0]} layers of KV for {len(layers)} attention layers")
    mapping = pages.slot_mapping(blocks, context.shape[3])
    for layer, (keys, values) in zip(layers, context, strict=True):
        cache = layer.kv_cache
        rows = [item.transpose(0, 1).to(runner.dtype).contiguous() for item in (keys, values)]
        layer.impl.do_kv_cache_update(layer, *rows, cache, mapping)


def attention_layers(runner: Any) -> list[Any]:
    """vLLM's attention modules in the order of the model's layers (experts are in the same table, and keep no KV)."""
    context = runner.compilation_config.static_forward_context
    return [context[name] for name in sorted(context, key=_layer_number) if hasattr(context[name], "kv_cache")]


def _layer_number(name: str) -> int:
    return next(int(item) for item in name.split(".") if item.isdigit())
