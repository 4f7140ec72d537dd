"""The four file formats that traffic comes in. Each parser turns lines into requests or reasons; none of them reads files.

A malformed line raises InputError naming file, line, field, value and remedy. A well-formed request that cannot be used
(no output was made, the prompt is an image) is a `Skipped`, so that it is counted and never lost.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from hotpass.errors import InputError
from hotpass.traffic.chatlog import parse_chat_line
from hotpass.traffic.records import NO_INPUT, NO_OUTPUT, Format, Request
from hotpass.traffic.where import Skipped, Where


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a file holds, in the order of the file. Arrivals are as written (ms); the reader makes them relative."""

    items: tuple[Request | Skipped, ...]
    has_clock: bool


def sniff(name: str, lines: Iterable[str]) -> Format:
    """The format of a file, from its first line with content. Raises InputError."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("{"):
            return _sniff_json(name, number, line)
        columns = {column.strip() for column in line.lstrip("\ufeff").split(",")}
        for kind, needed in CSV_COLUMNS.items():
            if set(needed.values()) <= columns:
                return kind
        break
    raise InputError(
        f"traffic file {name}",
        "its first line",
        "is in none of the known formats",
        f"name the format: {', '.join(item.value for item in Format if item is not Format.PRESET)}",
    )


def parse(name: str, kind: Format, lines: Iterable[str]) -> Parsed:
    """All requests of a file. Raises InputError for a malformed line."""
    if kind is Format.MOONCAKE:
        return Parsed(_with_blocks(name, list(_mooncake(name, lines))), has_clock=True)
    if kind is Format.OPENAI_LOG:
        return _chat_log(name, lines)
    return Parsed(tuple(_csv(name, kind, lines)), has_clock=True)


CSV_COLUMNS: Mapping[Format, Mapping[str, str]] = {
    Format.AZURE: {"arrival": "TIMESTAMP", "input": "ContextTokens", "output": "GeneratedTokens"},
    Format.BURSTGPT: {"arrival": "Timestamp", "input": "Request tokens", "output": "Response tokens"},
}
"""Azure: github.com/Azure/AzurePublicDataset. BurstGPT: github.com/HPMLL/BurstGPT (seconds since the trace began)."""

BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024, 2048, 4096)
"""Tokens a prefix block; Mooncake's own traces use 512."""


def _sniff_json(name: str, number: int, line: str) -> Format:
    record = Where(name, number).json_object(line)
    if "input_length" in record:
        return Format.MOONCAKE
    if any(key in record for key in ("messages", "prompt", "request", "body")):
        return Format.OPENAI_LOG
    raise InputError(
        f"traffic file {name} line {number}: fields",
        sorted(record),
        "belong to no known format",
        "a request has input_length (Mooncake) or messages or prompt (request log)",
    )


def _csv(name: str, kind: Format, lines: Iterable[str]) -> Iterator[Request | Skipped]:
    columns = CSV_COLUMNS[kind]
    reader = csv.DictReader(line.lstrip("\ufeff") for line in lines)
    missing = [column for column in columns.values() if column not in (reader.fieldnames or ())]
    if missing:
        raise InputError(
            f"traffic file {name} line 1: column", missing[0], "is missing", f"{kind} has {list(columns.values())}"
        )
    for row in reader:
        where = Where(name, reader.line_num)
        arrival = (_azure_ms if kind is Format.AZURE else _seconds_ms)(
            where, columns["arrival"], row[columns["arrival"]]
        )
        tokens = [where.count(columns[key], row[columns[key]]) for key in ("input", "output")]
        yield _request_or_reason(Request(arrival_ms=arrival, input_tokens=tokens[0], output_tokens=tokens[1]))


def _mooncake(name: str, lines: Iterable[str]) -> Iterator[tuple[int, Request]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = Where(name, number)
        record = where.json_object(line)
        hashes = record.get("hash_ids") or []
        if not isinstance(hashes, list) or not all(type(item) is int for item in hashes):
            where.refuse(
                "hash_ids", hashes, "is not a list of whole numbers", "write the ids of the prompt's leading blocks"
            )
        yield (
            number,
            Request(
                arrival_ms=where.number("timestamp", record.get("timestamp")),
                input_tokens=where.count("input_length", record.get("input_length")),
                output_tokens=where.count("output_length", record.get("output_length")),
                prefix_hashes=tuple(hashes),
            ),
        )


def _with_blocks(name: str, numbered: list[tuple[int, Request]]) -> tuple[Request | Skipped, ...]:
    """Requests with the block size that their hash chains imply: one size for a whole file."""
    chained = [(number, request) for number, request in numbered if request.prefix_hashes]
    size = _block_size(name, chained) if chained else 0
    return tuple(_request_or_reason(_blocked(request, size)) for _, request in numbered)


def _block_size(name: str, chained: list[tuple[int, Request]]) -> int:
    """The block size under which each chain covers its prompt, with a shorter last block or full blocks only."""
    fits = {size: [_covers(request, size) for _, request in chained] for size in BLOCK_SIZES}
    best = max(BLOCK_SIZES, key=lambda size: sum(fits[size]))
    if not all(fits[best]):
        number, request = chained[fits[best].index(False)]
        Where(name, number).refuse(
            "hash_ids",
            f"{len(request.prefix_hashes)} blocks for {request.input_tokens} tokens",
            f"does not fit blocks of {best} tokens, as the rest of the file has",
            "correct the length or the chain",
        )
    return best


def _covers(request: Request, size: int) -> bool:
    full, rest = divmod(request.input_tokens, size)
    return len(request.prefix_hashes) in (full, full + (rest > 0))


def _blocked(request: Request, size: int) -> Request:
    if not request.prefix_hashes:
        return request
    return Request(
        arrival_ms=request.arrival_ms,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        prefix_hashes=request.prefix_hashes,
        block_tokens=size,
    )


def _chat_log(name: str, lines: Iterable[str]) -> Parsed:
    items: list[Request | Skipped] = []
    clocks: list[tuple[int, bool]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = Where(name, number)
            item, has_clock = parse_chat_line(where, where.json_object(line))
            items.append(item)
            clocks.append((number, has_clock))
    if len({has_clock for _, has_clock in clocks}) == 2:
        number = next(number for number, has_clock in clocks if not has_clock)
        Where(name, number).refuse(
            "created", "", "is missing, while other lines have it", "give every line a time, or none"
        )
    return Parsed(tuple(items), has_clock=bool(clocks) and clocks[0][1])


def _request_or_reason(request: Request) -> Request | Skipped:
    if request.input_tokens == 0:
        return Skipped(NO_INPUT, request.context)
    if request.output_tokens == 0:
        return Skipped(NO_OUTPUT, request.context)
    return request


def _seconds_ms(where: Where, field: str, value: object) -> float:
    return where.number(field, value) * 1000.0


def _azure_ms(where: Where, field: str, value: object) -> float:
    """`2023-11-16 18:17:03.9799600`: seven decimals, which the standard parser of this Python does not take."""
    whole, _, decimals = str(value or "").strip().partition(".")
    try:
        moment = datetime.fromisoformat(whole)
        fraction = int(decimals[:7].ljust(7, "0")) / 1e4 if decimals else 0.0
    except ValueError:
        _refuse_time(where, field, value)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() * 1000.0 + fraction


def _refuse_time(where: Where, field: str, value: Any) -> NoReturn:
    where.refuse(field, value, "is not a time", "write it as 2023-11-16 18:17:03.9799600")
