"""The errors that hotpass raises, and their one rule: a bad *candidate* is a record, a bad *input* or *machine* is an exception.

What is not here: the failures of candidates. Those are rows with a status (`hotpass.records.measurement.Failure`).
"""

from __future__ import annotations

import os


class HotpassError(Exception):
    """Base of everything hotpass raises on purpose."""

    exit_code = 1


class InputError(HotpassError):
    """What the user gave cannot be used. The command line prints it as one sentence and exits with 2.

    `field` is what was wrong, `value` what it held, `remedy` what to do about it.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy
        super().__init__(f"{field} {_shown(value)} {problem}; {remedy}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return (type(self), (self.field, self.value, self.problem, self.remedy))


class MachineError(HotpassError):
    """The machine, not a candidate, failed: a dead engine, a full disk, a server that does not answer."""


class EngineDied(MachineError):
    """An engine process that must outlive candidates (keeper, zygote, reference child) is gone."""


class LedgerError(MachineError):
    """The ledger cannot be read or written; nothing that it acknowledged is lost."""


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, (str, os.PathLike)) else repr(value)
    return f"'{text}'" if len(text) <= 120 else f"'{text[:117]}...'"


LISTED = 20
"""Known names that one sentence holds."""


def nearest(name: str, known: list[str]) -> str:
    """A remedy that names the nearest known spelling: "did you mean 'x'? known: x, y". Of many, the first twenty are listed."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    more = f", … ({len(known)} in all)" if len(known) > LISTED else ""
    listed = ", ".join(sorted(known)[:LISTED]) + more
    return f"did you mean '{close[0]}'? known: {listed}" if close else f"known: {listed}"
