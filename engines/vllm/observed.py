"""A row of a side in a live vLLM as a profile sees it, and the work that its slots' places ask for.

    as loaded, one eager step ──forwards wrapped──► work of each call, by kind of module ──► summed over the slots above
    the side ──forwards wrapped──► calls of each slot

vLLM packs weights inside its own kernels, so that neither bytes nor FLOPs can be read off tensors and operators there: both follow from
what a module was made with (a linear layer's sizes and type, an attention's heads and the step's contexts). A module of a kind that is
not known here, and that has weights, makes the slots above it unknown. Forwards are wrapped on the instances, since vLLM calls many of
them past `Module.__call__`; modules inside compiled code are not watched, and `model` is then the forward that calls it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from engines.profile_child import Note, Work, bytes_of, profile_steps
from engines.vllm.rows import Rows
from engines.vllm.tree import Tree

WHOLE = "model"


def profile_row(
    tree: Tree, rows: Rows, side: str, row: int, slots: Sequence[str], tokens: torch.Tensor
) -> tuple[dict[str, Any], bytes]:
    """Plain figures of a row, and its Chrome trace. `tokens` [steps, …] as in a window; `slots` are the table's names.

    What a candidate's code raises passes through.
    """
    work = _work(tree, rows, side, row, slots, tokens)
    tree.activate(side)
    return profile_steps(ObservedRow(tree, rows, side, row, tokens, slots), slots, work, len(tokens))


class ObservedRow:
    """Implements `engines.profile_child.Observed`."""

    on_gpu = False

    def __init__(self, tree: Tree, rows: Rows, side: str, row: int, tokens: torch.Tensor, slots: Sequence[str]) -> None:
        self._rows, self._side, self._row, self._tokens = rows, side, row, tokens
        self._modules = _watched(tree, slots)
        self.parts = frozenset(tree.counts(side))
        self.watched: Sequence[str] = tuple(self._modules)

    def steps(self, count: int) -> Iterator[Callable[[], object]]:
        return self._rows.calls(self._side, self._row, self._tokens[:count])

    def wait(self) -> None:
        """A CPU has done it."""

    @contextmanager
    def around(self, enter: Note, leave: Note) -> Iterator[None]:
        with ExitStack() as wrapped:
            for slot, module in self._modules.items():
                wrapped.enter_context(_wrapped(module, _telling(slot, enter, leave)))
            yield


Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes a forward and its arguments, and gives its answer."""


def _telling(slot: str, enter: Note, leave: Note) -> Around:
    def told(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        enter(slot)
        try:
            return forward(*args, **kwargs)
        finally:
            leave(slot)

    return told


@contextmanager
def _wrapped(module: torch.nn.Module, around: Around) -> Iterator[None]:
    """Calls of the instance's forward go through `around`."""
    forward, held = module.forward, module.__dict__
    before = held.get("forward")
    held["forward"] = lambda *args, **kwargs: around(forward, args, kwargs)
    try:
        yield
    finally:
        del held["forward"]
        if before is not None:
            held["forward"] = before


def _watched(tree: Tree, slots: Sequence[str]) -> dict[str, torch.nn.Module]:
    compiled = tree.compiled.module
    if compiled is None:
        return {name: tree.modules[name] for name in slots}
    inside = set(compiled.modules())
    outside = {name: tree.modules[name] for name in slots if tree.modules[name] not in inside}
    return outside | {WHOLE: tree.root} if WHOLE in slots else outside


def _work(
    tree: Tree, rows: Rows, side: str, row: int, slots: Sequence[str], tokens: torch.Tensor
) -> Mapping[str, Work]:
    """Bytes and FLOPs of each slot in one step as loaded, on the pages of that side."""
    work: dict[str, Work] = defaultdict(Work)
    below: dict[str, Work] = defaultdict(Work)
    """Of a slot's calls and all those below: its weights, KV and FLOPs."""
    contexts = rows.contexts(row)
    open_slots: list[str] = []

    def noted(slot: str, module: torch.nn.Module) -> Around:
        def note(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            open_slots.append(slot)
            try:
                answer = forward(*args, **kwargs)
            finally:
                open_slots.pop()
            own = _own_work(module, (*args, *kwargs.values()), contexts)
            work[slot].bytes_moved += bytes_of((args, kwargs)) + bytes_of(answer)
            for above in {slot, *open_slots}:
                below[above].bytes_moved += own.bytes_moved
                below[above].flops += own.flops
                below[above].known &= own.known
            return answer

        return note

    tree.activate("")
    tree.compiled.dry(True)
    try:
        with ExitStack() as wrapped:
            for slot in slots:
                wrapped.enter_context(_wrapped(tree.modules[slot], noted(slot, tree.modules[slot])))
            for step in rows.calls(side, row, tokens[:1]):
                step()
    finally:
        tree.compiled.dry(False)
    for slot, found in below.items():
        work[slot].bytes_moved += found.bytes_moved
        work[slot].flops, work[slot].known = found.flops, found.known
    return work


def _own_work(module: torch.nn.Module, given: Sequence[Any], contexts: Sequence[tuple[int, int]]) -> Work:
    """Of one call, without what its children do: weights and KV that it reads, and FLOPs, two a multiply-add. `contexts`: of each
    sequence, positions before the step and tokens of it."""
    if isinstance(module, LinearBase):
        made = module.quant_config is None
        return _product(module.input_size, module.output_size, _tokens(given), module.params_dtype, known=made)
    if isinstance(module, LogitsProcessor):
        head = next(value for value in given if isinstance(value, VocabParallelEmbedding))
        known = getattr(head, "quant_config", None) is None
        return _product(
            head.embedding_dim, head.num_embeddings_per_partition, _tokens(given), head.params_dtype, known=known
        )
    if isinstance(module, Attention):
        pairs = sum(query * (context + query) for context, query in contexts)
        width = module.head_size + module.head_size_v
        element = module.kv_cache.element_size() if isinstance(module.kv_cache, torch.Tensor) else 0
        kept = sum(context + query for context, query in contexts) * module.num_kv_heads * width * element
        return Work(bytes_moved=kept, flops=2 * pairs * module.num_heads * width, known=element > 0)
    if isinstance(module, VocabParallelEmbedding):
        return Work()  # the rows looked up are its answer
    weights = list(module.parameters(recurse=False))
    small = all(parameter.dim() <= 1 for parameter in weights)
    return Work(bytes_moved=sum(map(bytes_of, weights)), known=small and not hasattr(module, "quant_method"))


def _product(inputs: int, outputs: int, tokens: int, dtype: torch.dtype, *, known: bool) -> Work:
    return Work(bytes_moved=inputs * outputs * dtype.itemsize, flops=2 * inputs * outputs * tokens, known=known)


def _tokens(given: Sequence[Any]) -> int:
    """Rows of the first tensor among arguments."""
    return next(value.numel() // value.shape[-1] for value in given if isinstance(value, torch.Tensor))
