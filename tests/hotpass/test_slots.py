"""Claims name slots: at one depth, or by class at any depth."""

from __future__ import annotations

import pytest

from hotpass.records.measurement import Tier
from hotpass.records.shapes import Phase, ShapeRow
from hotpass.records.slots import Slot, SlotTable, claim_matches, covered_slots

TREE = {
    "model": "forward",
    "head": "Linear",
    "layer.0": "Block",
    "layer.0.attention": "Attention",
    "layer.0.attention.query": "Linear",
    "layer.1": "Block",
    "layer.1.attention": "Attention",
    "layer.1.attention.query": "Linear",
}


@pytest.fixture
def table() -> SlotTable:
    slots = [
        Slot(name=name, stands_for=kind, signature="(x)", reference_sha256="0", lowest_tier=Tier.FAST)
        for name, kind in TREE.items()
    ]
    return SlotTable(engine="module", version="1", slots=tuple(slots))


@pytest.mark.parametrize(
    ("claim", "slot", "matches"),
    [
        ("layer.*.attention", "layer.1.attention", True),
        ("layer.*.attention", "layer.1.attention.query", False),
        ("**.query", "layer.0.attention.query", True),
        ("**.query", "query", True),
        ("layer.**.query", "layer.0.attention.query", True),
        ("head.**.query", "layer.0.attention.query", False),
        ("**", "model", False),
    ],
)
def test_two_stars_stand_for_any_depth(claim: str, slot: str, matches: bool) -> None:
    assert claim_matches(claim, slot) is matches


def test_a_class_chooses_among_slots_of_any_depth(table: SlotTable) -> None:
    assert [slot.name for slot in table.matching("**", "Linear")] == [
        "head", "layer.0.attention.query", "layer.1.attention.query",
    ]  # fmt: skip
    assert len(table.matching("**")) == len(TREE) - 1
    # at one depth another class is an error of the part, which whoever installs it reports
    assert [slot.stands_for for slot in table.matching("head", "Attention")] == ["Linear"]


def test_coverage_follows_the_class(table: SlotTable) -> None:
    covered = covered_slots(table, ["**"], ["query"], "Attention")
    assert covered == {"layer.0.attention", "layer.1.attention"}


def test_rows_of_named_inputs_have_keys_of_their_own() -> None:
    rows = [
        ShapeRow(
            phase=Phase.FORWARD, num_seqs=8, query_tokens=1024, context_mean=0, context_max=0,
            steps_share=0.5, tokens_share=0.5, name=name,
        )
        for name in ("heavy", "light")
    ]  # fmt: skip
    assert [row.key for row in rows] == ["forward heavy n8 q1024", "forward light n8 q1024"]
