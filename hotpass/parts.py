"""Parts: the decorator that declares one, and how a declaration is read from source text *without running it*.

The search, the builder and the command line only ever read declarations; the text is executed in an engine's child, and nowhere else.

A part may declare C++: `native={"step": "step.cpp"}` names files beside `part.py`. The builder compiles each to a shared
library before an engine is asked to install it, with every bound parameter as `-DHP_<NAME>=<value>` (bool as 0/1), and
`ctx.native["step"]` is the loaded `ctypes.CDLL`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from hotpass.domain import Domain
from hotpass.errors import InputError
from hotpass.records.candidate import Numerics, PartSource, PartUse, Reload, Value

ENGINES = ("decoder", "module", "vllm")
DEVICES = ("cpu", "cuda", "any")
SOURCE_SUFFIXES = (".py", ".cpp", ".cu", ".h", ".hpp")

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartDeclaration:
    """What a part says about itself."""

    class_name: str
    summary: str
    """The class docstring: why it should help and where it will not."""
    engine: str
    """`decoder`, `module` or `vllm`."""
    claims: tuple[str, ...]
    """Slot patterns that it replaces, subtree included: `*` stands for one path component, `**` for any number."""
    keeps: tuple[str, ...] = ()
    """Children of the claimed slot that stay, and that it still calls (`ctx.kept(name)`)."""
    replaces: str = ""
    """Class that the claimed slots must stand for (`LlamaDecoderLayer`); empty for `model`. With `**` it chooses among the slots."""
    domain: str = "True"
    """Expression over phase, num_seqs, query_tokens, context, ranks; outside it the incumbent runs."""
    params: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Parameter → allowed values; the first is the default."""
    numerics: Numerics = Numerics.TOLERANCE
    numerics_when: Mapping[str, str] = field(default_factory=dict)
    """`"bits=8"` → class, where a parameter value or the deployment's dtype (`"dtype=bfloat16"`) changes it."""
    reload: Reload = Reload.HOT
    device: str = "any"
    requires: tuple[str, ...] = ()
    """What the deployment must have: `packed:Q4_1`, `isa:avx2`, `compiler`, `family:llama`; checked before proposing."""
    requires_when: Mapping[str, str] = field(default_factory=dict)
    """`"weights_as=gguf"` → a term as in `requires`, needed only with that parameter value."""
    native: Mapping[str, str] = field(default_factory=dict)
    """Library name → C++ file beside part.py."""
    native_flags: tuple[str, ...] = ()
    """Extra compiler flags, from `engines.build.ALLOWED_FLAGS`."""

    @property
    def parsed_domain(self) -> Domain:
        return Domain.parse(self.domain)

    def defaults(self) -> dict[str, Value]:
        return {name: values[0] for name, values in self.params.items()}

    def bind(self, source: PartSource, params: Mapping[str, Value] | None = None) -> PartUse:
        """The part with every parameter bound, defaults filled in. Raises InputError for an unknown name or value."""
        bound = self.defaults()
        for name, value in (params or {}).items():
            if name not in self.params:
                raise InputError(f"{source.name}: parameter", name, "is not declared", f"known: {sorted(self.params)}")
            if value not in self.params[name]:
                raise InputError(
                    f"{source.name}: parameter {name}",
                    value,
                    "is not an allowed value",
                    f"use one of {list(self.params[name])}",
                )
            bound[name] = value
        return PartUse(source=source, params=bound)

    def required_with(self, params: Mapping[str, Value]) -> tuple[str, ...]:
        """Terms that these parameter values need beyond `requires`."""
        facts = {f"{name}={_spelled(value)}" for name, value in params.items()}
        return tuple(term for condition, term in self.requires_when.items() if condition in facts)

    def numerics_of(self, params: Mapping[str, Value], dtype: str) -> Numerics:
        """The class of this part with these parameters on a deployment of that dtype: the widest that applies."""
        facts = {f"{name}={_spelled(value)}" for name, value in params.items()} | {f"dtype={dtype}"}
        found = [
            Numerics(kind)
            for condition, kind in self.numerics_when.items()
            if all(term.strip() in facts for term in condition.split(","))
        ]
        return max(found, key=lambda kind: kind.rank) if found else self.numerics


def part(
    *,
    engine: str,
    claims: Sequence[str],
    keeps: Sequence[str] = (),
    replaces: str = "",
    domain: str = "True",
    params: Mapping[str, Sequence[Value]] | None = None,
    numerics: str = "tolerance",
    numerics_when: Mapping[str, str] | None = None,
    reload: str = "hot",
    device: str = "any",
    requires: Sequence[str] = (),
    requires_when: Mapping[str, str] | None = None,
    native: Mapping[str, str] | None = None,
    native_flags: Sequence[str] = (),
) -> Callable[[_Class], _Class]:
    """Declare a class as a part. Every argument must be a literal, since the declaration is read without running the file.

    The class may have `weights(self, w, params) -> dict[str, Tensor]` (pure; `w` maps names of the slot's own weights, relative to
    the claimed slot, to tensors), `prepare(self, ctx, params)`, `forward(self, *args)` and `close(self)`.
    """
    declared = {
        "engine": engine,
        "claims": tuple(claims),
        "keeps": tuple(keeps),
        "replaces": replaces,
        "domain": domain,
        "params": {name: tuple(values) for name, values in (params or {}).items()},
        "numerics": numerics,
        "numerics_when": dict(numerics_when or {}),
        "reload": reload,
        "device": device,
        "requires": tuple(requires),
        "requires_when": dict(requires_when or {}),
        "native": dict(native or {}),
        "native_flags": tuple(native_flags),
    }

    def mark(cls: _Class) -> _Class:
        cls.__hotpass_part__ = declared  # type: ignore[attr-defined]
        return cls

    return mark


def read_part(path: Path) -> PartSource:
    """A part from a `.py` file, or from a folder with `part.py` and the files that it names. Raises InputError."""
    if not path.exists():
        raise InputError("part", path, "does not exist", "give a .py file or a folder with part.py")
    if path.is_file():
        return PartSource(name=path.stem, files=(("part.py", _text(path)),))
    files = [
        (str(item.relative_to(path)), _text(item))
        for item in sorted(path.rglob("*"))
        if item.is_file() and item.suffix in SOURCE_SUFFIXES and "__pycache__" not in item.parts
    ]
    if "part.py" not in dict(files):
        raise InputError("part", path, "has no part.py", "put the class decorated with @part into part.py")
    return PartSource(name=path.name, files=tuple(files))


@lru_cache(maxsize=1024)
def declaration(source: PartSource) -> PartDeclaration:
    """The declaration in a part's text, read from its syntax tree. Raises InputError naming the line.

    Kept: candidates are made and installed far more often than parts change.
    """
    where = f"part {source.name}"
    try:
        tree = ast.parse(source.text())
    except SyntaxError as error:
        raise InputError(where, f"line {error.lineno}", f"is not Python: {error.msg}", "correct the syntax") from None
    found = [
        (node, call) for node in tree.body if isinstance(node, ast.ClassDef) for call in [_part_call(node)] if call
    ]
    if len(found) != 1:
        raise InputError(
            where, f"{len(found)} classes with @part", "is not one", "decorate exactly one class with @part"
        )
    node, call = found[0]
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        try:
            arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            raise InputError(
                where,
                f"{keyword.arg} (line {keyword.value.lineno})",
                "is not a literal",
                "write the value out in the decorator",
            ) from None
    if call.args:
        raise InputError(where, f"line {call.lineno}", "has positional arguments", "name each argument of @part")
    return _validated(where, node, arguments, source)


def conflicts(
    a: PartDeclaration, a_covers: frozenset[str], b: PartDeclaration, b_covers: frozenset[str]
) -> frozenset[str]:
    """Slots that both parts cover on a shape that both serve; non-empty means that they cannot be composed."""
    shared = a_covers & b_covers
    return shared if shared and a.parsed_domain.meets(b.parsed_domain) else frozenset()


def _validated(where: str, node: ast.ClassDef, arguments: dict[str, Any], source: PartSource) -> PartDeclaration:
    known = set(PartDeclaration.__dataclass_fields__) - {"class_name", "summary"}
    for name in arguments:
        if name not in known:
            raise InputError(where, name, "is not an argument of @part", f"known: {sorted(known)}")
    for name in ("engine", "claims"):
        if not arguments.get(name):
            raise InputError(where, name, "is missing", f"add {name}=… to @part")
    if isinstance(arguments["claims"], str):
        raise InputError(where, arguments["claims"], "is not a list of claims", "write claims=[…]")
    if arguments["engine"] not in ENGINES:
        raise InputError(where, arguments["engine"], "is not an engine", f"use one of {list(ENGINES)}")
    if arguments.get("device", "any") not in DEVICES:
        raise InputError(where, arguments["device"], "is not a device", f"use one of {list(DEVICES)}")
    for name, kind in (("numerics", Numerics), ("reload", Reload)):
        if name in arguments:
            try:
                arguments[name] = kind(arguments[name])
            except ValueError:
                raise InputError(
                    where, arguments[name], f"is not a {name} class", f"use one of {[k.value for k in kind]}"
                ) from None
    for name, values in dict(arguments.get("params", {})).items():
        if not isinstance(values, (list, tuple)) or not values:
            raise InputError(where, f"params[{name!r}]", "has no values", "list the allowed values, the default first")
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    if "forward" not in methods:
        raise InputError(where, node.name, "has no forward", "add `def forward(self, …)` with the slot's signature")
    for library, file in dict(arguments.get("native", {})).items():
        if file not in dict(source.files):
            raise InputError(
                where, f"native[{library!r}]={file!r}", "is not beside part.py", "add the file to the part's folder"
            )
    Domain.parse(arguments.get("domain", "True"))
    return PartDeclaration(
        class_name=node.name,
        summary=ast.get_docstring(node) or "",
        engine=arguments["engine"],
        claims=tuple(arguments["claims"]),
        keeps=tuple(arguments.get("keeps", ())),
        replaces=arguments.get("replaces", ""),
        domain=arguments.get("domain", "True"),
        params={name: tuple(values) for name, values in arguments.get("params", {}).items()},
        numerics=arguments.get("numerics", Numerics.TOLERANCE),
        numerics_when=dict(arguments.get("numerics_when", {})),
        reload=arguments.get("reload", Reload.HOT),
        device=arguments.get("device", "any"),
        requires=tuple(arguments.get("requires", ())),
        requires_when=dict(arguments.get("requires_when", {})),
        native=dict(arguments.get("native", {})),
        native_flags=tuple(arguments.get("native_flags", ())),
    )


def _part_call(node: ast.ClassDef) -> ast.Call | None:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            function = decorator.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name == "part":
                return decorator
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError("part", path, "is not UTF-8 text", "save it as UTF-8") from None


def _spelled(value: Value) -> str:
    return str(value)
