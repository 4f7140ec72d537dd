"""Recapture: vLLM's compiled forward taken out, and compiled again with a side's parts inside.

    as loaded: compiled at load ── set aside ─► parts on the modules, each behind one opaque operator ─► compiled again by vLLM itself

With vLLM's compile mode a swapped forward changes nothing: its code was traced in at load (and vLLM's own cache key does not know of
it, so a compiled engine keeps none on disk). Each side has a compiled state of its own, and parts are called through `hotpass::part`,
an operator that the compiler cannot look into: a call counted there is a call made. Such a part gets and gives tensors whose first
dimension is the step's tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engines.decoder.source import failed
from hotpass.records.measurement import FailureKind

Forward = Callable[..., Any]

STATE = (
    "aot_compiled_fn", "was_aot_compile_fn_loaded_from_disk", "compiled", "first_compile", "_compiled_callable", "_compiled_bytecode",
    "_bytecode_hook_handle",
)  # fmt: skip
"""Attributes of a compiled module of vLLM that hold what was compiled."""

_serial = itertools.count()
_sites: dict[int, _Site] = {}


@dataclass(kw_only=True, slots=True)
class _Site:
    """What stands behind one call of the operator."""

    forward: Forward
    """The dispatcher of a slot."""
    names: tuple[str, ...] = ()
    """Of keyword arguments, after the positional ones."""
    places: tuple[bool, ...] = ()
    """For each argument whether it is a tensor; others are None."""
    widths: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...] = ()
    """For each output its shape beyond the first dimension, and type; None for an output that is None."""
    single: bool = True
    """Whether the forward gives one tensor and not a tuple."""


@torch.library.custom_op("hotpass::part", mutates_args=())
def _part(tensors: Sequence[torch.Tensor], site: int) -> list[torch.Tensor]:
    known = _sites[site]
    given = iter(tensors)
    arguments = [next(given) if is_tensor else None for is_tensor in known.places]
    count = len(arguments) - len(known.names)
    answer = known.forward(*arguments[:count], **dict(zip(known.names, arguments[count:], strict=True)))
    outputs = [answer] if known.single else list(answer)
    inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    # An operator may not give its own inputs back.
    return [
        item.clone() if item.untyped_storage().data_ptr() in inputs else item for item in outputs if item is not None
    ]


@_part.register_fake
def _(tensors: Sequence[torch.Tensor], site: int) -> list[torch.Tensor]:
    known = _sites[site]
    tokens = tensors[0].shape[0]
    return [
        torch.empty((tokens, *item[0]), dtype=item[1], device=tensors[0].device)
        for item in known.widths
        if item is not None
    ]


class Opaque:
    """A slot's dispatcher as the compiler meets it: first learnt by one eager step, then one operator."""

    def __init__(self, slot: str, forward: Forward) -> None:
        self.slot = slot
        self.number = next(_serial)
        self._learnt = False
        _sites[self.number] = _Site(forward=forward)

    def forget(self) -> None:
        _sites.pop(self.number, None)

    def learn(self, *args: Any, **kwargs: Any) -> Any:
        """Run eagerly, and note what goes in and comes out. Raises CandidateFailed for what no operator can carry."""
        known = _sites[self.number]
        arguments = [*args, *kwargs.values()]
        answer = known.forward(*args, **kwargs)
        known.names = tuple(kwargs)
        known.places = tuple(isinstance(item, torch.Tensor) for item in arguments)
        known.single = not isinstance(answer, (tuple, list))
        outputs = [answer] if known.single else list(answer)
        tokens = next((item.shape[0] for item in arguments if isinstance(item, torch.Tensor)), -1)
        for item in [*arguments, *outputs]:
            carried = item is None or (isinstance(item, torch.Tensor) and item.dim() > 0 and item.shape[0] == tokens)
            if not carried:
                problem = f"{self.slot} passes {type(item).__name__}, which no operator of tokens can carry"
                raise failed(FailureKind.INSTALL, f"{problem}; load with enforce_eager")
        known.widths = tuple(None if item is None else (tuple(item.shape[1:]), item.dtype) for item in outputs)
        self._learnt = True
        return answer

    def forward(self) -> Forward:
        """What goes onto the module while it is compiled and after."""
        if not self._learnt:
            raise failed(FailureKind.INSTALL, f"{self.slot} was not reached by a step: nothing to compile")
        known, number = _sites[self.number], self.number
        widths, single = known.widths, known.single

        def opaque(*args: Any, **kwargs: Any) -> Any:
            tensors = [item for item in (*args, *kwargs.values()) if item is not None]
            made = torch.ops.hotpass.part(tensors, number)
            if single:
                return made[0]
            outputs, place = [], 0
            for width in widths:
                outputs.append(None if width is None else made[place])
                place += width is not None
            return tuple(outputs)

        return opaque


class CompiledStates:
    """The compiled module of a model, and what each side has compiled of it."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.module = _compiled_module(root)
        self._born = self._state() if self.module is not None else {}
        self._sides: dict[str, dict[str, Any]] = {}

    @property
    def compiles(self) -> bool:
        """Whether vLLM compiles this model at all; under `enforce_eager` it does not."""
        return self.module is not None

    def clear(self, side: str) -> None:
        self._sides.pop(side, None)

    def select(self, side: str) -> None:
        """What a side has compiled; of a side without anything, as loaded."""
        if self.module is not None:
            self._put(self._sides.get(side, self._born))

    def dry(self, on: bool) -> None:
        """While on, steps run eagerly: to learn what a part takes and gives."""
        if self.module is not None:
            self.module.do_not_compile = on

    def begin(self) -> None:
        """From now on the next step of the module compiles."""
        from vllm.compilation.wrapper import reset_compile_wrapper
        from vllm.config import set_current_vllm_config

        assert self.module is not None
        with set_current_vllm_config(self.module.vllm_config):
            reset_compile_wrapper(self.module)

    def keep(self, side: str) -> None:
        """What was compiled since `begin` is the side's."""
        self._sides[side] = self._state()

    def _state(self) -> dict[str, Any]:
        held = vars(self.module)
        return {name: held[name] for name in STATE if name in held}

    def _put(self, state: dict[str, Any]) -> None:
        for name in STATE:
            self.module.__dict__.pop(name, None)
        self.module.__dict__.update(state)


def _compiled_module(root: torch.nn.Module) -> Any:
    """The module that vLLM compiles: the one that says whether it does, and does."""
    found = [module for module in root.modules() if getattr(module, "do_not_compile", True) is False]
    return found[0] if found else None
