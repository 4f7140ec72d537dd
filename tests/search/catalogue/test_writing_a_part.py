"""The guide's parts and the example part, as a newcomer would run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hotpass.parts import declaration, read_part
from hotpass.records.candidate import PartSource
from tests.search.catalogue.programs import Bench, bindings

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/writing-a-part.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
PARTS = [PartSource(name=f"snippet-{i}", files=(("part.py", text),)) for i, text in enumerate(SNIPPETS)]
PARTS += [read_part(path) for path in sorted((ROOT / "examples/parts").iterdir()) if path.name[0] not in "_."]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("model"), "float32")


def test_the_guide_has_parts() -> None:
    assert len(SNIPPETS) == 2
    assert len(PARTS) == 3


@pytest.mark.parametrize("source", PARTS, ids=lambda source: source.name)
def test_part_of_the_guide_is_right(bench: Bench, source: PartSource) -> None:
    for params in bindings(source):
        bench.install(source, params)
        calls = [bench.run("candidate", row) for row in bench.rows]
        assert sum(sum(ran.activation.values()) for ran in calls) > 0
        for row, ran in enumerate(calls):
            assert (sum(ran.activation.values()) > 0) == bench.serves(source, row)
            assert bench.error(ran, row) < 5e-5
    assert declaration(source).summary
