"""A function for each annotated type that makes a value of it from plain JSON: worked out once a type, called for thousands of records.

Says nothing of what does not fit (`Misfit`): `hotpass.decode`, which holds to the same rules, then goes again and names the place.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotpass.canonical import Json, to_plain

NON_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}

Decoder = Callable[[Json], Any]


class Misfit(ValueError):
    """The value does not have the form of the type."""


@functools.cache
def decoder_of(kind: Any) -> Decoder:
    """Of any annotated type that a record may have. The function raises Misfit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda plain: plain
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin in (tuple, list, Sequence):
        return _sequence(origin, arguments)
    if origin in (dict, Mapping):
        return _mapping(*map(decoder_of, arguments))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return functools.partial(_made, kind)
    return _number if kind is float else _exactly(types.NoneType if kind is None else kind)


def _made(kind: Any, plain: Json) -> Any:
    try:
        return kind(plain)
    except (TypeError, ValueError):
        raise Misfit from None


def _number(plain: Json) -> Any:
    if type(plain) is float or type(plain) is int:
        return plain
    if type(plain) is str and plain in NON_FINITE:
        return NON_FINITE[plain]
    raise Misfit


def _exactly(kind: Any) -> Decoder:
    def decode(plain: Json) -> Any:
        if type(plain) is not kind:
            raise Misfit
        return plain

    return decode


def _union(arguments: tuple[Any, ...]) -> Decoder:
    # Exact scalar types first, so that True does not become an int, nor a text a float.
    exact = frozenset(kind for kind in arguments if isinstance(kind, type))
    decoders = [decoder_of(kind) for kind in arguments]

    def decode(plain: Json) -> Any:
        if type(plain) in exact:
            return plain
        for decoder in decoders:
            try:
                return decoder(plain)
            except Misfit:
                continue
        raise Misfit

    return decode


def _sequence(origin: Any, arguments: tuple[Any, ...]) -> Decoder:
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        decoders = [decoder_of(kind) for kind in arguments]

        def decode_each(plain: Json) -> Any:
            if not isinstance(plain, list) or len(plain) != len(decoders):
                raise Misfit
            return tuple(decoder(item) for decoder, item in zip(decoders, plain, strict=True))

        return decode_each
    one = decoder_of(arguments[0])

    def decode(plain: Json) -> Any:
        if not isinstance(plain, list):
            raise Misfit
        items = [one(item) for item in plain]
        return tuple(items) if origin is tuple else items

    return decode


def _mapping(key: Decoder, value: Decoder) -> Decoder:
    def decode(plain: Json) -> Any:
        if not isinstance(plain, dict):
            raise Misfit
        return {key(name): value(item) for name, item in plain.items()}

    return decode


def _record(kind: type) -> Decoder:
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    given = {field.name: decoder_of(hints[field.name]) for field in fields if field.init}
    computed = [field.name for field in fields if not field.init]

    def decode(plain: Json) -> Any:
        if not isinstance(plain, dict):
            raise Misfit
        values = {}
        for name, item in plain.items():
            decoder = given.get(name)
            if decoder is not None:
                values[name] = decoder(item)
            elif name not in computed:
                raise Misfit
        try:
            record = kind(**values)
        except (TypeError, ValueError):
            raise Misfit from None
        if any(name in plain and to_plain(getattr(record, name)) != plain[name] for name in computed):
            raise Misfit
        return record

    return decode
