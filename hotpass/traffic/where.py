"""A place in a traffic file, and reading values there: every refusal names file, line and field. Nothing here knows a format."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from hotpass.errors import InputError


@dataclass(frozen=True, slots=True)
class Skipped:
    """A well-formed request that cannot be used."""

    reason: str
    tokens: int
    """Input and output tokens, as far as known."""


@dataclass(frozen=True, slots=True)
class Where:
    """A line of a file."""

    file: str
    line: int
    """Counted from 1."""

    def refuse(self, field: str, value: object, problem: str, remedy: str) -> NoReturn:
        shown = "(nothing)" if value is None or value == "" else value
        raise InputError(f"traffic file {self.file} line {self.line}: {field}", shown, problem, remedy)

    def json_object(self, text: str) -> dict[str, Any]:
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            self.refuse("text", text.strip(), f"is not JSON ({error.msg})", "write one JSON object a line")
        if not isinstance(record, dict):
            self.refuse("text", text.strip(), "is not a JSON object", "write one JSON object a line")
        return record

    def number(self, field: str, value: object) -> float:
        """A finite number, at least 0."""
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            self.refuse(field, value, "is not a number of at least 0", "correct the line or remove it")
        return number

    def count(self, field: str, value: object) -> int:
        """A whole number, at least 0."""
        number = self.number(field, value)
        if number != int(number):
            self.refuse(field, value, "is not a whole number", "token counts are whole")
        return int(number)
