"""What is compiled while the engine loads: what will be tried first, and only that."""

from __future__ import annotations

from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, Numerics
from search.catalogue import find_part, load_catalogue
from search.proposers import needs_building
from tests.search.builders import deployment


def found(allowed: Numerics = Numerics.TOLERANCE, compiler: bool = True) -> list[Candidate]:
    where = deployment(packed_formats=("Q4_1", "Q8_0"))
    return needs_building(load_catalogue("cpu"), where, allowed=allowed, compiler=compiler)


def test_the_whole_model_in_native_code_is_built_with_the_values_that_are_tried_first() -> None:
    (candidate,) = found()
    (use,) = candidate.parts
    assert (use.source.name, use.params) == ("cpp-model", declaration(find_part("cpp-model")).defaults())
    assert candidate.numerics is Numerics.TOLERANCE


def test_nothing_is_built_that_may_not_be_tried() -> None:
    assert found(compiler=False) == []
    assert found(allowed=Numerics.BIT_IDENTICAL) == []
