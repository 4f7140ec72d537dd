"""Measured forward passes of a campaign as one table: a row a window and side, with the columns that a cost model needs.

    passes/<first seq>-<last seq>.parquet      derived from the log's measurements, so never the only copy

Files are written in batches, each whole or not at all; what is not in one yet (or was in one that is damaged) is read from the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.events import Event, read_events
from hotpass.canonical import content_hash
from hotpass.errors import LedgerError

if TYPE_CHECKING:
    import pandas

EVENTS = "events"
PASSES = "passes"

PASS_COLUMNS = (
    "seq", "time", "candidate", "incumbent", "tier", "purpose", "phase", "num_seqs", "query_tokens", "context_mean",
    "context_max", "layers", "side", "round", "window", "order", "ms_per_step", "steps", "environment", "engine", "threads",
    "dtype", "kind",
)  # fmt: skip
"""One row a window and side. `candidate` is an id, or `baseline:<name>`; `time` seconds since 1970; `environment` a
fingerprint: compare rows of equal ones only; `dtype` is the model's declared one; `kind` is `measured` or `simulated`."""

WHOLE = (
    "seq", "num_seqs", "query_tokens", "context_mean", "context_max", "layers", "round", "window", "steps", "threads",
)  # fmt: skip
REAL = ("time", "ms_per_step")


class PassWriter:
    """Collects measured passes from the log's events and writes them out in batches, each file whole or not at all."""

    def __init__(self, folder: Path, dtype: str, *, rows_per_file: int = 50_000) -> None:
        self.folder = Path(folder) / PASSES
        self.dtype = dtype
        self.last_seq = max((last for _, last, _ in _pass_files(self.folder)), default=0)
        """Events up to this one are in files."""
        self._rows_per_file = rows_per_file
        self._rows: list[dict[str, Any]] = []
        self._first = self.last_seq + 1
        self._seen = self.last_seq

    def add(self, event: Event) -> Path | None:
        """Take the passes of an event that is not in a file yet; a file that became full is written and returned."""
        if event.seq <= self._seen:
            return None
        self._seen = event.seq
        self._rows.extend(pass_rows(event, self.dtype))
        return self.flush() if len(self._rows) >= self._rows_per_file else None

    def flush(self) -> Path | None:
        """Write what is collected; None when that is nothing."""
        if not self._rows:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self._first:09d}-{self._seen:09d}.parquet"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            _frame(self._rows).to_parquet(temporary, index=False)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.rename(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise LedgerError(f"measured passes cannot be written to {path}: {error.strerror}") from error
        self._rows, self._first, self.last_seq = [], self._seen + 1, self._seen
        return path


def read_passes(folder: Path, *, dtype: str = "") -> pandas.DataFrame:
    """Every measured forward pass of a campaign, columns `PASS_COLUMNS`, while it runs too.

    Files first, the rest from the log (also what a damaged file should have held), where `dtype` fills the column.
    """
    import pandas

    folder = Path(folder)
    frames, covered = [], set[int]()
    for first, last, path in _pass_files(folder / PASSES):
        try:
            frames.append(pandas.read_parquet(path))
        except (OSError, ValueError):  # pyarrow's errors are ValueErrors
            continue
        covered |= set(range(first, last + 1))
    dtype = dtype or next((str(frame["dtype"].iloc[0]) for frame in frames if len(frame)), "")
    rows = [
        row for event in read_events(folder / EVENTS) if event.seq not in covered for row in pass_rows(event, dtype)
    ]
    return pandas.concat([*frames, _frame(rows)], ignore_index=True).sort_values(
        "seq", kind="stable", ignore_index=True
    )


def pass_rows(event: Event, dtype: str) -> Iterator[dict[str, Any]]:
    """The measured passes in one event: four windows a block. Other events have none."""
    if event.kind != "measurement":
        return
    payload, result = event.payload, event.payload["result"]
    environment = result.get("environment") or {}
    baseline = payload.get("baseline")
    common = {
        "seq": event.seq,
        "time": event.time,
        "candidate": f"baseline:{baseline}" if baseline else payload["candidate_id"],
        "incumbent": payload.get("incumbent_id", ""),
        "tier": payload.get("tier", "fast"),
        "purpose": payload.get("purpose", "baseline"),
        "environment": content_hash(environment) if environment else "",
        "engine": result.get("engine", ""),
        "threads": environment.get("threads", 0),
        "dtype": dtype,
        "kind": "simulated" if result.get("simulated") else "measured",
    }
    for block in result.get("blocks", ()):
        row = block["row"]
        shape = {name: row[name] for name in ("phase", "num_seqs", "query_tokens", "context_mean", "context_max")}
        about = {
            "layers": block["layers"],
            "round": block["round_index"],
            "order": block["order"],
            "steps": block["steps_per_window"],
        }
        for side, window, ms in _windows(block):
            yield {**common, **shape, **about, "side": side, "window": window, "ms_per_step": float(ms)}


def _windows(block: Mapping[str, Any]) -> Iterator[tuple[str, int, float]]:
    """(side, place in the block, ms per step) in the order in which the windows ran."""
    times = {"A": iter(block["incumbent_ms"]), "B": iter(block["candidate_ms"])}
    names = {"A": "incumbent", "B": "candidate"}
    for window, letter in enumerate(block["order"]):
        yield names[letter], window, next(times[letter])


def _frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    import pandas

    frame = pandas.DataFrame(list(rows), columns=list(PASS_COLUMNS))
    kinds = {name: "int64" if name in WHOLE else "float64" if name in REAL else "str" for name in PASS_COLUMNS}
    return frame.astype(kinds)  # of an empty one too, so that it can be joined to others


def _pass_files(folder: Path) -> list[tuple[int, int, Path]]:
    found = []
    for path in sorted(folder.glob("*.parquet")):
        first, _, last = path.stem.partition("-")
        if first.isdigit() and last.isdigit():
            found.append((int(first), int(last), path))
    return found
