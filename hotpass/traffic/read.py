"""Traffic from a file or a preset: open, sniff, parse, order, and count what cannot be used. Nothing is ever clipped."""

from __future__ import annotations

import dataclasses
import gzip
import io
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from hotpass.errors import InputError, nearest
from hotpass.traffic import presets
from hotpass.traffic.formats import parse, sniff
from hotpass.traffic.records import (
    BEYOND_CONTEXT,
    BEYOND_LIMIT,
    NO_INPUT,
    NO_OUTPUT,
    Dropped,
    Format,
    Lengths,
    Request,
    Traffic,
    make_traffic,
)
from hotpass.traffic.where import Skipped

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens added."""


def read_traffic(
    source: str | Path,
    *,
    max_context: int | None = None,
    limit: int | None = None,
    format: str | None = None,
    encode: Encode | None = None,
) -> Traffic:
    """Traffic from a file (plain or gzip) or a preset's name; a preset's name wins over a file of that name in the folder.

    `max_context`: requests whose input and output exceed it are dropped and counted. `limit`: at most so many usable
    requests, the first by arrival; the others are counted. `format`: overrides what the content looks like. `encode`:
    the tokenizer of the deployment, by which text-bearing requests are counted in place of the log's own counts.
    Raises InputError.
    """
    for name, value in (("max_context", max_context), ("limit", limit)):
        if value is not None and value < 1:
            raise InputError(name, value, "is not possible", "give a whole number of at least 1")
    if str(source) in presets.PRESETS and format is not None and not Path(source).exists():
        raise InputError("traffic format", format, f"is for files, and {source} is a preset", "leave it out")
    if str(source) in presets.PRESETS and format is None:
        preset = presets.PRESETS[str(source)]
        return _traffic(
            preset.name, Format.PRESET, presets.build(preset), has_clock=True, max_context=max_context, limit=limit,
            note=preset.note,
        )  # fmt: skip
    path = Path(source)
    lines = _lines(path)
    kind = Format.named(format) if format else sniff(path.name, lines)
    parsed = parse(path.name, kind, lines)
    items: Iterable[Request | Skipped] = parsed.items
    if encode is not None:
        items = [counted(item, encode) if isinstance(item, Request) else item for item in items]
    return _traffic(path.name, kind, items, has_clock=parsed.has_clock, max_context=max_context, limit=limit)


def counted(request: Request, encode: Encode) -> Request | Skipped:
    """The request with its text counted by this tokenizer; requests without text stay as they are."""
    if request.text is None:
        return request
    input_tokens = len(encode(request.text))
    output_tokens = request.output_tokens if request.response is None else len(encode(request.response))
    if input_tokens == 0 or output_tokens == 0:
        return Skipped(NO_INPUT if input_tokens == 0 else NO_OUTPUT, input_tokens + output_tokens)
    return dataclasses.replace(
        request,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        lengths=Lengths.COUNTED,
        asked_input_tokens=request.input_tokens if request.lengths is Lengths.GIVEN else None,
    )


def _traffic(
    name: str,
    kind: Format,
    items: Iterable[Request | Skipped],
    *,
    has_clock: bool,
    max_context: int | None,
    limit: int | None,
    note: str = "",
) -> Traffic:
    """Order by arrival, then drop by reason."""
    items = list(items)
    counts: Counter[str] = Counter()
    tokens: Counter[str] = Counter()

    def drop(reason: str, num_tokens: int) -> None:
        counts[reason] += 1
        tokens[reason] += num_tokens

    used: list[Request] = []
    for item in items:
        if isinstance(item, Skipped):
            drop(item.reason, item.tokens)
    for request in sorted(
        (item for item in items if isinstance(item, Request)), key=lambda request: request.arrival_ms
    ):
        if max_context is not None and request.context > max_context:
            drop(BEYOND_CONTEXT, request.context)
        elif limit is not None and len(used) >= limit:
            drop(BEYOND_LIMIT, request.context)
        else:
            used.append(request)
    dropped = {reason: Dropped(requests=counts[reason], tokens=tokens[reason]) for reason in sorted(counts)}
    start = used[0].arrival_ms if used else 0.0
    requests = tuple(_since(request, start) for request in used)
    return make_traffic(name, kind, requests, has_clock=has_clock, dropped=dropped, note=note)


def _since(request: Request, start_ms: float) -> Request:
    # Four decimals are the 100 ns of the finest trace; more would be noise of the subtraction.
    return dataclasses.replace(request, arrival_ms=round(request.arrival_ms - start_ms, 4))


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        known = ", ".join(presets.PRESETS)
        problem = "is a folder" if path.is_dir() else "is neither a file nor a preset"
        remedy = (
            f"give a trace file, or {nearest(str(path), list(presets.PRESETS))}"
            if not path.is_dir()
            else f"give a file or one of {known}"
        )
        raise InputError("traffic", str(path), problem, remedy)
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return list(itertools.chain(io.StringIO(data.decode("utf-8"), newline=None)))
    except (OSError, EOFError) as error:
        raise InputError("traffic file", path.name, f"is not a whole gzip file ({error})", "fetch it again") from None
    except UnicodeDecodeError as error:
        raise InputError(
            "traffic file", path.name, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8"
        ) from None
