"""Every planted part is rejected, for the reason that its first lines give.

A file under `parts/` is one cheat. Its docstring says what it does; `Tier:` names the tier that judges it (fast where absent), and
`Rejected: <verdict>: <pattern>` what must come of it. Several verdicts are possible where the machine decides what is seen first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotpass.records.measurement import Tier, Verdict
from tests.cheats.judging import Bench, planted

PARTS = sorted((Path(__file__).parent / "parts").glob("*.py"))
CHEATS = [path for path in PARTS if path.name != "__init__.py"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("cheats"))
    yield made
    made.engine.close()


def told(path: Path, name: str, default: str = "") -> str:
    """A line of the file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = re.search(rf"^{name}: (.*)$", text, re.MULTILINE)
    return found.group(1) if found else default


@pytest.mark.parametrize("path", CHEATS, ids=[path.stem for path in CHEATS])
def test_a_cheat_is_rejected_for_its_reason(path: Path, bench: Bench) -> None:
    verdicts, _, pattern = told(path, "Rejected").partition(": ")
    keeper = bench.engine._loaded.keeper.pid
    result = bench.measure(planted(path), Tier(told(path, "Tier", "fast")))
    attempt = bench.verdict(result)
    assert attempt.verdict in {Verdict(name) for name in verdicts.split("|")}, attempt.reason
    assert re.search(pattern, attempt.reason), attempt.reason
    assert attempt.speedup is None
    assert bench.engine._loaded.keeper.pid == keeper, "the weights were never loaded again"


def test_there_are_enough_of_them() -> None:
    assert len(CHEATS) >= 25
