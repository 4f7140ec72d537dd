"""From a part's text to a class: compiled from the very bytes that its hash is of, never through the import system.

Each compilation is a module of its own, under a name that nobody else has; its lines are in `linecache`, so that tracebacks and
`inspect.getsource` (Triton uses it) show them. Nothing here decides where a part goes.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engines.program import CandidateFailed
from hotpass.errors import InputError
from hotpass.parts import PartDeclaration, declaration
from hotpass.records.candidate import PartUse, Value
from hotpass.records.measurement import Failure, FailureKind

_serial = itertools.count()
DETAIL_CHARS = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledPart:
    """A part's class, ready to make instances."""

    use: PartUse
    declared: PartDeclaration
    cls: type
    module: types.ModuleType

    @property
    def name(self) -> str:
        return self.use.source.name

    @property
    def has_weights(self) -> bool:
        return callable(getattr(self.cls, "weights", None))

    def forget(self) -> None:
        """Take the module out of the interpreter's tables."""
        sys.modules.pop(self.module.__name__, None)
        linecache.cache.pop(str(self.module.__file__), None)


def compile_part(use: PartUse) -> CompiledPart:
    """Run a part's text and find its class. Raises CandidateFailed (install) with the traceback."""
    name = use.source.name
    try:
        declared = declaration(use.source)
    except InputError as error:
        raise failed(FailureKind.INSTALL, str(error)) from None
    text = use.source.text()
    digest = use.source.sha256[:12]
    module = types.ModuleType(f"hotpass_part_{digest}_{next(_serial)}")
    filename = f"/hotpass/parts/{module.__name__}/part.py"
    module.__file__ = filename
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        exec(compile(text, filename, "exec", dont_inherit=True), module.__dict__)
        cls = module.__dict__[declared.class_name]
    except (Exception, SystemExit) as error:
        sys.modules.pop(module.__name__, None)
        linecache.cache.pop(filename, None)
        raise failed_by(error, FailureKind.INSTALL, f"part {name} does not load") from None
    return CompiledPart(use=use, declared=declared, cls=cls, module=module)


def derive(part: CompiledPart, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the part's `weights` makes of a slot's own weights (names relative to the slot); {} when it has none.

    Raises CandidateFailed (build).
    """
    if not part.has_weights:
        return {}
    try:
        with torch.no_grad():
            made: Any = part.cls().weights(weights, dict(part.use.params))
    except (Exception, SystemExit) as error:
        raise failed_by(error, FailureKind.BUILD, f"part {part.name}: weights() fails") from None
    if not isinstance(made, Mapping) or not all(isinstance(value, torch.Tensor) for value in made.values()):
        raise failed(FailureKind.BUILD, f"part {part.name}: weights() must return a mapping of names to tensors")
    return {str(name): tensor.detach() for name, tensor in made.items()}


def bound_params(use: PartUse, declared: PartDeclaration) -> dict[str, Value]:
    """Every declared parameter with its value. Raises CandidateFailed for one that is unknown or not allowed."""
    try:
        return dict(declared.bind(use.source, use.params).params)
    except InputError as error:
        raise failed(FailureKind.INSTALL, str(error)) from None


def failed(kind: FailureKind, message: str, detail: str = "") -> CandidateFailed:
    return CandidateFailed(Failure(kind=kind, message=message, detail=detail[-DETAIL_CHARS:]))


def failed_by(error: BaseException, kind: FailureKind, prefix: str) -> CandidateFailed:
    """A failure that tells what was raised and where; one already told is passed on; running out of memory is its own kind."""
    if isinstance(error, CandidateFailed):
        return error
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "not enough memory" in str(error):
        kind = FailureKind.MEMORY
    detail = "".join(traceback.format_exception(error))
    return failed(kind, f"{prefix}: {type(error).__name__}: {error}"[:500], detail)
