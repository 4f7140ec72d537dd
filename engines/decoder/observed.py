"""A row of a side of the decoder or the module engine as a profile sees it, and the work that its slots' places ask for.

    as loaded, one step ──hooks, FLOP counter──► least work of each slot        the side ──hooks──► calls of each slot

Slots below a compiled layer cannot be watched: hooks inside would break its code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from engines.decoder.side import DecoderSide
from engines.decoder.slots import WHOLE
from engines.decoder.windows import synchronize
from engines.flops import flop_counter
from engines.profile_child import Note, Work, bytes_of, profile_steps

_LOOKED_UP = (torch.nn.Embedding, torch.nn.EmbeddingBag)

Slots = Mapping[str, torch.nn.Module]
"""Slot → its module on a side; `model` stands for the side's forward."""


def profile_row(
    side: DecoderSide, loaded: DecoderSide, slots: Sequence[str], row: int, tokens: torch.Tensor
) -> tuple[dict[str, Any], bytes]:
    """Plain figures of a row, and its Chrome trace. `tokens` [steps, …] as in a window; `slots` are the table's names.

    What a candidate's code raises passes through.
    """
    with torch.inference_mode():
        work = _work(loaded, {name: _module(loaded, name) for name in slots}, row, tokens[0])
        side.activate()
        return profile_steps(ObservedSide(side, slots, row, tokens), slots, work, len(tokens))


class ObservedSide:
    """Implements `engines.profile_child.Observed`."""

    def __init__(self, side: DecoderSide, slots: Sequence[str], row: int, tokens: torch.Tensor) -> None:
        self._side, self._row, self._tokens = side, row, tokens
        self._modules = {name: _module(side, name) for name in slots if not _is_inside_compiled(side, name)}
        self.parts = frozenset(side.installed.counts) if side.installed is not None else frozenset()
        self.watched: Sequence[str] = tuple(self._modules)
        self.on_gpu = side.device.type == "cuda"

    def steps(self, count: int) -> Iterator[Callable[[], object]]:
        for step in range(count):
            yield partial(self._side.run, self._side.row_batch(self._row, step, self._tokens[step]))

    def wait(self) -> None:
        synchronize(self._side.device)

    @contextmanager
    def around(self, enter: Note, leave: Note) -> Iterator[None]:
        """Hooks on modules; the side's own forward for `model`."""
        side = self._side
        forward = side.forward

        def whole(*args: Any, **kwargs: Any) -> Any:
            enter(WHOLE)
            try:
                return forward(*args, **kwargs)
            finally:
                leave(WHOLE)

        with ExitStack() as hooks:
            for slot, module in self._modules.items():
                if slot != WHOLE:
                    hooks.enter_context(_hook(module, _telling(enter, slot), _telling(leave, slot)))
            side.forward = whole
            try:
                yield
            finally:
                side.forward = forward


def _module(side: DecoderSide, slot: str) -> torch.nn.Module:
    return side.net.model if slot == WHOLE else side.net.modules[slot]


def _is_inside_compiled(side: DecoderSide, slot: str) -> bool:
    if side.settings["compile_mode"] == "none" or slot == WHOLE:
        return False
    return any(path == "" or slot.startswith(f"{path}.") for path in side.net.layer_paths)


def _work(loaded: DecoderSide, modules: Slots, row: int, tokens: torch.Tensor) -> dict[str, Work]:
    """Bytes and FLOPs of each slot in one step as loaded."""
    work: dict[str, Work] = defaultdict(Work)

    def note(slot: str, module: torch.nn.Module, given: Any, answer: Any) -> None:
        work[slot].calls += 1
        work[slot].bytes_moved += bytes_of(given) + bytes_of(answer)

    loaded.activate()
    with ExitStack() as hooks, flop_counter() as counter:
        for slot, module in modules.items():
            hooks.enter_context(_hook(module, lambda *_: None, _noting(note, slot)))
        loaded.run(loaded.row_batch(row, 0, tokens))
    root = type(loaded.net.model).__name__
    counted = {
        str(name).removeprefix(f"{root}."): sum(operators.values())
        for name, operators in counter.get_flop_counts().items()
    }
    for slot, module in modules.items():
        work[slot].flops = int(counted.get(root if slot == WHOLE else slot, 0))
        work[slot].bytes_moved += _weight_bytes(module, work[slot].calls) + _kv_bytes(loaded, slot, row)
    return work


def _noting(note: Callable[..., None], slot: str) -> Callable[..., None]:
    return lambda module, args, kwargs, answer: note(slot, module, (args, kwargs), answer)


def _weight_bytes(module: torch.nn.Module, calls: int) -> int:
    """Every weight below a module once; of lookup tables nothing, since the rows looked up are the outputs."""
    if not calls:
        return 0
    read = {
        parameter.data_ptr(): parameter.numel() * parameter.element_size()
        for child in module.modules()
        if not isinstance(child, _LOOKED_UP)
        for parameter in child.parameters(recurse=False)
    }
    return sum(read.values())


def _kv_bytes(side: DecoderSide, slot: str, row: int) -> int:
    """Of the attention at or below a slot; 0 for a module without a cache."""
    kv, plan = side.kv, side.plan
    if not kv.num_layers:
        return 0
    keys = kv.keys(0)
    per_token = 2 * keys.shape[1] * keys.shape[3] * keys.element_size()
    tokens = sum(plan.row_contexts(row)) + sum(plan.row_query_lens(row))
    return _attention_layers(side, slot) * per_token * tokens


def _attention_layers(side: DecoderSide, slot: str) -> int:
    below = "" if slot == WHOLE else f"{slot}."
    layers = {
        module.layer_idx
        for name, module in side.net.modules.items()
        if "hotpass_step" in module.__dict__ and (name == slot or name.startswith(below))
    }
    return len(layers)


def _telling(note: Note, slot: str) -> Callable[..., None]:
    return lambda *_: note(slot)


@contextmanager
def _hook(module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    pre = module.register_forward_pre_hook(before)
    post = module.register_forward_hook(after, with_kwargs=True, always_call=True)
    try:
        yield
    finally:
        pre.remove()
        post.remove()
