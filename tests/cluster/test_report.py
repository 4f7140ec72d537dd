"""The report: self-contained, complete, escaped, and about the right numbers."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from cluster.campaign import run_campaign
from cluster.report import charts, write_report
from cluster.report.data import gather, tier_agreement
from cluster.report.page import render
from hotpass.records.candidate import PartSource
from tests.cluster.campaigns import PARTS, make_running, part

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a winning part whose text carries markup."""
    source = part("quick-attention", "self_attn")
    evil = PartSource(name="quick-attention", files=(("part.py", source.text() + f"\n# {EVIL}\n"),))
    parts = tuple(evil if p.name == "quick-attention" else p for p in PARTS)
    folder = tmp_path_factory.mktemp("report") / "c"
    run_campaign(make_running(folder, parts=parts))
    return folder


def test_it_asks_nothing_of_the_network_and_runs_no_script(folder: Path) -> None:
    text = write_report(folder).read_text()
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|<script|<link""", text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_it_has_every_section(folder: Path) -> None:
    text = render(gather(folder))
    for title in (
        "What is claimed", "Gates", "Best so far", "Who proposed what", "Gain by part", "What bought how much", "Shape table", "Step time against the physical floor",
        "Baselines and the A/A row", "Rejected candidates", "Reloads", "The candidate&#x27;s sources", "Environment", "Reproduce",
    ):  # fmt: skip
        assert title in text or title.replace("&#x27;", "'") in text, title
    assert text.count("<svg") == 5
    assert "SIGSEGV" in text
    assert "simulated-loop" in text
    assert "A/A: as loaded against itself" in text


def test_the_rows_hold_the_times_of_the_shown_measurement(folder: Path) -> None:
    data = gather(folder)
    assert {item.row.key for item in data.rows} == {row.key for row in data.plan.deployment.shapes.rows}
    for item in data.rows:
        assert item.incumbent_ms / item.candidate_ms == pytest.approx(1 / 0.56, rel=0.03)
        assert item.floor_ms is None
    assert data.kind == "simulated"


def test_gains_are_of_parts_alone_and_mark_the_winner(folder: Path) -> None:
    gains = {gain.name: gain for gain in gather(folder).gains}
    assert gains["quick-mlp"].in_winner
    assert not gains["slow-norm"].in_winner
    alone = [gains[name].alone for name in ("quick-mlp", "quick-attention")]
    assert alone[0] is not None
    assert alone[0].value == pytest.approx(1 / 0.7, rel=0.05)
    assert gains["crash-mlp"].alone is None


def test_an_unfinished_campaign_has_a_report(tmp_path: Path) -> None:
    from cluster.events import EventLog
    from cluster.journal import FOLDER
    from cluster.plan import write_plan
    from tests.cluster.campaigns import make_plan

    write_plan(tmp_path / "c", make_plan(tmp_path / "c"))
    EventLog.open(tmp_path / "c" / FOLDER).close()
    text = write_report(tmp_path / "c").read_text()
    assert "nothing was proven faster" in text


def test_sources_are_a_diff_against_the_reference_where_it_is_kept(folder: Path) -> None:
    from cluster.release import REFERENCES, reference_name

    (folder / REFERENCES).mkdir(exist_ok=True)
    (folder / REFERENCES / reference_name("model.layers.*.mlp")).write_text("class LlamaMLP:\n    pass\n")
    diffs = {diff.title: diff for diff in gather(folder).diffs}
    mlp = diffs["quick-mlp/part.py"]
    assert mlp.against == "model.layers.*.mlp"
    assert "-class LlamaMLP:" in mlp.lines
    assert any(line.startswith("+class Part") for line in mlp.lines)
    assert diffs["quick-attention/part.py"].against == ""


def test_agreement_of_tiers_needs_three_candidates(folder: Path) -> None:
    tau, pairs = tier_agreement(gather(folder).state)
    assert (tau is None) == (pairs < 3)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.97, 1.03), (0.0, 300.0), (-2.0, 5.0)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = charts.nice_ticks(low, high)
    assert 3 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    steps = {round(b - a, 9) for a, b in itertools.pairwise(ticks)}
    assert len(steps) == 1
