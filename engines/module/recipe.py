"""How a user gives a module: a Python file, or `module:function`, whose function returns the module and named example inputs.

    def load():                                    # `FILE.py` means its function `load`; `FILE.py:other` another one
        return Net(), {"single": {"x": torch.randn(1, 16)}, "batch": Example({"x": torch.randn(32, 16)}, share=0.2)}

A function with a parameter is given the folder that its files lie in. The same text runs again in every child, with torch's random
numbers seeded alike; there its parameters and buffers are replaced by the keeper's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import linecache
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotpass.canonical import content_hash
from hotpass.errors import InputError

FUNCTION = "load"
"""Name of the function in a file, unless another one is named."""


@dataclass(frozen=True)
class Example:
    """One example input, where a mapping or a tuple alone does not say enough."""

    inputs: Mapping[str, Any] | Sequence[Any] | torch.Tensor
    """Keyword arguments, positional arguments, or the only one."""
    share: float = 1.0
    """How often, relative to the other examples."""
    constant: tuple[str, ...] = ()
    """Arguments that stay as they are here; others are drawn anew for every call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The text of a recipe, and how to run it."""

    text: str
    origin: str
    """File that the text was read from: its tracebacks and `__file__` name it."""
    function: str
    folder: str
    """Files of the recipe, given to a function that has a parameter."""
    module: str = ""
    """Imported under this name when it is part of a package; empty for a file of its own."""
    search_path: tuple[str, ...] = ()
    """Folders that its imports need."""


def find_recipe(name: str) -> Recipe:
    """The recipe that a file or a `module:function` names. Raises InputError."""
    place, _, function = name.partition(":")
    path = Path(place).expanduser()
    if path.suffix == ".py":
        if not path.is_file():
            raise InputError(
                "model", name, "is not a file", "give a Python file that returns the module and its inputs"
            )
        path = path.absolute()
        return Recipe(
            text=_text(name, path),
            origin=str(path),
            function=function or FUNCTION,
            folder=str(path.parent),
            search_path=(str(path.parent),),
        )
    if not function:
        raise InputError("model", name, "names no function", "write FILE.py, FILE.py:function or module:function")
    if not {"", str(Path.cwd())} & set(sys.path):  # what `python -m` would find
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError) as error:
        raise InputError("model", name, f"cannot be imported ({error})", "check the module's name and path") from None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError("model", name, "is no Python module that can be imported", "check the module's name and path")
    root = Path(spec.origin).parents[len(place.split(".")) - (1 if not spec.submodule_search_locations else 0)]
    return Recipe(
        text=_text(name, Path(spec.origin)),
        origin=spec.origin,
        function=function,
        folder=str(Path(spec.origin).parent),
        module=place,
        search_path=(str(root),),
    )


def run_recipe(recipe: Recipe) -> tuple[torch.nn.Module, dict[str, Example]]:
    """The module, in evaluation mode and without gradients, and its examples. Raises InputError for what cannot be served."""
    for folder in reversed(recipe.search_path):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    torch.manual_seed(0)
    try:
        made = _called(recipe)
    except InputError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        problem = f"fails in {recipe.function}() ({type(error).__name__}: {first})"
        raise InputError("model", recipe.origin, problem, "make it run by itself first") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping) and made[1]):
        raise InputError(
            "model", recipe.origin, f"{recipe.function}() does not return two things",
            "return the module and a mapping of names to example inputs",
        )  # fmt: skip
    module, examples = made
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            "model",
            recipe.origin,
            "returns a TorchScript module",
            "return the Python module: TorchScript has no code to replace",
        )
    if not isinstance(module, torch.nn.Module):
        raise InputError("model", recipe.origin, f"returns a {type(module).__name__} first", "return a torch.nn.Module")
    module.eval().requires_grad_(False)
    return module, {str(name): _example(value) for name, value in examples.items()}


def arguments_of(example: Example) -> dict[str, Any]:
    """Name → argument; positional ones are named by their index."""
    inputs = example.inputs
    if isinstance(inputs, torch.Tensor):
        return {"0": inputs}
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return {str(index): value for index, value in enumerate(inputs)}


def _example(value: Any) -> Example:
    return value if isinstance(value, Example) else Example(value)


def _called(recipe: Recipe) -> Any:
    namespace = importlib.import_module(recipe.module) if recipe.module else _executed(recipe)
    function = getattr(namespace, recipe.function, None)
    if not callable(function):
        raise InputError("model", recipe.origin, f"has no function {recipe.function}", "define it, or name another one")
    return function(Path(recipe.folder)) if inspect.signature(function).parameters else function()


def _executed(recipe: Recipe) -> types.ModuleType:
    """A file of its own, run from the very text that was read; its classes can be inspected and unpickled like any module's."""
    name = f"hotpass_recipe_{content_hash([recipe.origin, recipe.text])[:12]}"
    module = types.ModuleType(name)
    module.__file__ = recipe.origin
    linecache.cache[recipe.origin] = (len(recipe.text), None, recipe.text.splitlines(keepends=True), recipe.origin)
    sys.modules[name] = module
    exec(compile(recipe.text, recipe.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def _text(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("model", name, f"cannot be read ({error})", "give a Python file in UTF-8") from None
