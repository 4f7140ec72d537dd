"""What counts as residue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.judge.clean import MEMORY_MARGIN_BYTES, differences
from engines.program import Fingerprint

BIRTH = Fingerprint(
    probes={"layers 0 to 1": "a", "layers 2 to 3": "b"},
    flags={"threads": "2", "grad": "False"},
    threads_alive=3,
    children_alive=0,
    resident_bytes=1 << 30,
    open_files=9,
)


def test_a_child_as_it_was_born_has_no_differences() -> None:
    assert differences(BIRTH, replace(BIRTH, device_bytes=8 << 20)) == []
    smaller = replace(BIRTH, resident_bytes=1, open_files=8, threads_alive=2)
    assert differences(BIRTH, BIRTH) == differences(BIRTH, smaller) == []
    assert differences(BIRTH, replace(BIRTH, probes={"layers 2 to 3": "b"})) == [], "one window in turn answers"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"probes": {"layers 2 to 3": "a"}}, "the baseline no longer computes what it did at birth (layers 2 to 3)"),
        ({"probes": {"layers 0 to 1": "a b"}}, "the baseline no longer computes what it did at birth (layers 0 to 1)"),
        ({"probes": {"layers 4 to 5": "a"}}, "the baseline no longer computes what it did at birth (layers 4 to 5)"),
        ({"probes": {}}, "the baseline no longer computes what it did at birth (no answer)"),
        ({"flags": {"threads": "1", "grad": "False"}}, "threads 2 -> 1"),
        ({"flags": {"threads": "2"}}, "grad False -> absent"),
        ({"flags": {"threads": "2", "grad": "False", "hook": "x"}}, "hook absent -> x"),
        ({"threads_alive": 4}, "threads 3 -> 4"),
        ({"children_alive": 2}, "2 processes left behind"),
        ({"open_files": 12}, "open files 9 -> 12"),
        ({"resident_bytes": (1 << 30) + MEMORY_MARGIN_BYTES + (1 << 20)}, "resident memory grew by 513 MiB"),
        ({"device_bytes": (9 << 20) + 1}, "device memory grew by 9 MiB"),
    ],
)
def test_each_residue_is_named(change: dict[str, object], reason: str) -> None:
    assert differences(BIRTH, replace(BIRTH, **change)) == [reason]  # type: ignore[arg-type]
