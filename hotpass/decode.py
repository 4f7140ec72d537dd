"""Plain JSON values back into the records they came from: the inverse of `hotpass.canonical.to_plain`.

Strict on purpose: a key that the record does not have, or a required key that is absent, is an error that names the path to it,
so that a log written by another version never turns quietly into a half-filled record. What is not here: reading files.

What fits is decoded by `hotpass.decoders`, without a word about where it is; this module finds the words for what does not.

JSON has no infinity and no NaN; `json_safe` writes them as the words below, and a field declared `float` reads them back.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hotpass.canonical import Json, to_plain
from hotpass.decoders import NON_FINITE, Misfit, decoder_of

T = TypeVar("T")


class DecodeError(ValueError):
    """A plain value does not have the form of the record it should become."""


def json_safe(value: object) -> Json:
    """`to_plain`, with infinities and NaN spelled as words, so that any record can be written as JSON."""
    return _spell_non_finite(to_plain(value))


def from_plain(kind: type[T], plain: Json) -> T:
    """A record (or any annotated type) from its plain form.

    Fields that a record computes itself (`init=False`, as `Candidate.id`) are not taken from the plain value but compared with it.
    Raises DecodeError naming the path of the first thing that does not fit.
    """
    try:
        return typing.cast(T, decoder_of(typing.cast(Any, kind))(plain))
    except Misfit:
        return typing.cast(T, _decode(kind, plain, kind.__name__))  # again with paths, for the message


def _spell_non_finite(plain: Json) -> Json:
    if isinstance(plain, float) and not math.isfinite(plain):
        return "NaN" if math.isnan(plain) else ("Infinity" if plain > 0 else "-Infinity")
    if isinstance(plain, dict):
        return {key: _spell_non_finite(item) for key, item in plain.items()}
    if isinstance(plain, list):
        return [_spell_non_finite(item) for item in plain]
    return plain


def _decode(kind: Any, plain: Json, path: str) -> Any:
    if kind is Any:
        return plain
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, plain, path)
    if origin in (tuple, list, Sequence):
        return _decode_sequence(origin, arguments, plain, path)
    if origin in (dict, Mapping):
        if not isinstance(plain, dict):
            raise DecodeError(f"{path}: {plain!r} is not a mapping")
        return {
            _decode(arguments[0], key, f"{path} key"): _decode(arguments[1], item, f"{path}[{key!r}]")
            for key, item in plain.items()
        }
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, plain, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(plain)
        except ValueError:
            raise DecodeError(f"{path}: {plain!r} is not a {kind.__name__}") from None
    return _decode_scalar(kind, plain, path)


def _decode_scalar(kind: Any, plain: Json, path: str) -> Any:
    if kind is float:
        if isinstance(plain, str) and plain in NON_FINITE:
            return NON_FINITE[plain]
        # An int stays one: identity hashes the value as its maker wrote it.
        if isinstance(plain, (int, float)) and not isinstance(plain, bool):
            return plain
    elif (kind is None or kind is types.NoneType) and plain is None:
        return None
    elif kind in (str, bool, int, dict, list) and type(plain) is kind:
        return plain
    raise DecodeError(f"{path}: {plain!r} is not {getattr(kind, '__name__', kind)}")


def _decode_union(arguments: tuple[Any, ...], plain: Json, path: str) -> Any:
    # Exact scalar types first, so that True does not become an int, nor a text a float.
    for kind in arguments:
        if (kind is types.NoneType and plain is None) or (isinstance(kind, type) and type(plain) is kind):
            return plain
    problems = []
    for kind in arguments:
        try:
            return _decode(kind, plain, path)
        except DecodeError as error:
            problems.append(str(error))
    raise DecodeError(problems[-1])


def _decode_sequence(origin: Any, arguments: tuple[Any, ...], plain: Json, path: str) -> Any:
    if not isinstance(plain, list):
        raise DecodeError(f"{path}: {plain!r} is not a list")
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        if len(arguments) != len(plain):
            raise DecodeError(f"{path}: {len(plain)} items where {len(arguments)} are expected")
        return tuple(
            _decode(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(arguments, plain, strict=True))
        )
    items = [_decode(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(plain)]
    return tuple(items) if origin is tuple else items


def _decode_record(kind: Any, plain: Json, path: str) -> Any:
    if not isinstance(plain, dict):
        raise DecodeError(f"{path}: {plain!r} is not a {kind.__name__}")
    hints, fields = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    for name in plain:
        if name not in fields:
            raise DecodeError(f"{path}: {kind.__name__} has no field {name!r}")
    given = {
        name: _decode(hints[name], plain[name], f"{path}.{name}")
        for name, field in fields.items()
        if field.init and name in plain
    }
    try:
        record = kind(**given)
    except (TypeError, ValueError) as error:
        raise DecodeError(f"{path}: {error}") from None
    for name, field in fields.items():
        if not field.init and name in plain and to_plain(getattr(record, name)) != plain[name]:
            raise DecodeError(f"{path}.{name}: is {plain[name]!r}, but the content makes it {getattr(record, name)!r}")
    return record


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
