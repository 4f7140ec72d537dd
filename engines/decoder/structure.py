"""What a module tree is made of, beside the weights' values: classes, attributes, children, hooks, addresses, contents of buffers.

Facts are plain values that compare equal as long as nothing was changed; they are read after every candidate, so that what can be known
at birth is kept. Weights lie in sealed memory, so that their addresses are enough.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Facts = tuple[object, ...]

OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes of any module: registries, of which what matters is looked into."""
GROWING = frozenset({"max_seq_len_cached", "attention_scaling"})
"""What some rotary embeddings change with the length of what they have seen."""
PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types whose values are compared; of any other value only which object it is. A value's own `__class__` is not asked: configurations make
that slow."""
HASHED_VALUES = 1 << 16
"""Buffers are compared by content up to this size, by address beyond it."""


class Structure:
    """Of the modules of one tree, which is as loaded when this is made."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = [
            (module, tuple(names), OF_EVERY_MODULE | GROWING | names)
            for module in modules
            for names in (vars(module).keys() - OF_EVERY_MODULE - GROWING,)
        ]

    def facts(self) -> Facts:
        """Now."""
        return tuple(_facts(module, names, known) for module, names, known in self._modules)


def _facts(module: torch.nn.Module, names: tuple[str, ...], known: frozenset[str]) -> Facts:
    """Values of attributes that are plain, of others which object they are. One that is new counts when it hides one of the class:
    compilers and caches add some of their own. `names`: attributes at birth; `known`: those, and what every module has."""
    own = vars(module)
    return (
        id(type(module)),
        tuple(value if type(value) in PLAIN else id(value) for value in map(own.get, names)),
        tuple(sorted(name for name in own if name not in known and hasattr(type(module), name))),
        len(module._forward_hooks),
        len(module._forward_pre_hooks),
        tuple(map(id, module._modules.values())),
        tuple(_place(weight) for weight in module._parameters.values() if weight is not None),
        *(
            _content(buffer)
            for buffer in module._buffers.values()
            if buffer is not None and not _follows_length(module)
        ),
    )


def _place(weight: torch.Tensor) -> object:
    return id(weight), weight.data_ptr(), weight.dtype, weight.shape, weight.stride()


def _content(buffer: torch.Tensor) -> object:
    if buffer.numel() > HASHED_VALUES:
        return buffer.data_ptr()
    return buffer.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _follows_length(module: torch.nn.Module) -> bool:
    """Whether its frequencies follow the length of what it has seen."""
    kind = str(getattr(module, "rope_type", ""))
    return "dynamic" in kind or "longrope" in kind
