"""How the sides of a pair are to live: by why they are measured, and by what the candidate does to a process."""

from __future__ import annotations

import pytest

from hotpass.pairing import choose_pairing, reload_classes
from hotpass.records.candidate import AS_LOADED, Candidate, PartSource, PartUse, Reload
from hotpass.records.measurement import Pairing, Purpose, Tier


def part(reload: str) -> Candidate:
    text = (
        "from hotpass import part\n"
        f"@part(engine='decoder', claims=['model'], reload='{reload}')\n"
        "class Part:\n    def forward(self, batch, kv): ...\n"
    )
    return Candidate(parts=(PartUse(source=PartSource(name="part", files=(("part.py", text),))),))


COMPILED = Candidate(settings={"compile_mode": "default"})


@pytest.mark.parametrize(
    ("candidate", "pairing"),
    [
        (part("hot"), Pairing.SIDE_BY_SIDE),
        (part("reweight"), Pairing.SIDE_BY_SIDE),
        (part("rekv"), Pairing.SIDE_BY_SIDE),
        (part("recapture"), Pairing.TWO_ENGINES),
        (part("reshard"), Pairing.TWO_ENGINES),
        (part("restart"), Pairing.TWO_ENGINES),
        (COMPILED, Pairing.TWO_ENGINES),
        (Candidate(settings={"compile_mode": "none", "threads": 2}), Pairing.SIDE_BY_SIDE),
        (Candidate(settings={"kv_dtype": "bfloat16"}), Pairing.SIDE_BY_SIDE),
        (Candidate(settings={"gpu_memory_utilization": 0.5}), Pairing.TWO_ENGINES),
        (Candidate(parallelism={"tp": 2}), Pairing.TWO_ENGINES),
        (Candidate(parts=(*part("hot").parts,), settings={"compile_mode": "default"}), Pairing.TWO_ENGINES),
    ],
)
def test_in_the_search_the_reload_decides(candidate: Candidate, pairing: Pairing) -> None:
    assert choose_pairing(AS_LOADED, candidate, Tier.FAST, Purpose.SEARCH) is pairing


def test_what_the_incumbent_did_to_its_process_does_not_count() -> None:
    assert choose_pairing(COMPILED, part("hot"), Tier.FAST, Purpose.SEARCH) is Pairing.SIDE_BY_SIDE


def test_promoted_and_claimed_ones_have_processes_of_their_own() -> None:
    assert choose_pairing(AS_LOADED, part("hot"), Tier.SLOW, Purpose.SEARCH) is Pairing.TWO_ENGINES
    assert choose_pairing(AS_LOADED, part("hot"), Tier.FAST, Purpose.COLD) is Pairing.TWO_ENGINES


@pytest.mark.parametrize("tier", list(Tier))
def test_as_loaded_beside_itself_stays_in_one_process(tier: Tier) -> None:
    assert choose_pairing(AS_LOADED, AS_LOADED, tier, Purpose.AA) is Pairing.SIDE_BY_SIDE
    assert choose_pairing(COMPILED, COMPILED, tier, Purpose.AA) is Pairing.SIDE_BY_SIDE


def test_classes_are_those_of_parts_settings_and_degrees() -> None:
    both = Candidate(parts=part("reweight").parts, settings={"kv_dtype": "bfloat16"}, parallelism={"tp": 2})
    assert reload_classes(both) == {Reload.REWEIGHT, Reload.REKV, Reload.RESHARD}
    broken = Candidate(parts=(PartUse(source=PartSource(name="broken", files=(("part.py", "class ("),))),))
    assert reload_classes(broken) == frozenset()


def test_logs_of_earlier_versions_are_read() -> None:
    assert Pairing("two-processes") is Pairing.TWO_ENGINES
    with pytest.raises(ValueError, match="not a valid"):
        Pairing("three-engines")
