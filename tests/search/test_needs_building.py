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


def names(candidates: list[Candidate]) -> list[str]:
    return [candidate.parts[0].source.name for candidate in candidates]


def test_the_whole_model_in_native_code_comes_first_with_the_values_that_are_tried_first() -> None:
    candidates = found()
    use = candidates[0].parts[0]
    assert (use.source.name, use.params) == ("cpp-model", declaration(find_part("cpp-model")).defaults())
    assert candidates[0].numerics is Numerics.TOLERANCE
    assert all(len(candidate.parts) == 1 for candidate in candidates)


def test_then_what_else_replaces_the_whole_model_then_native_code_then_derived_weights() -> None:
    order = names(found())
    assert order[1:3] == ["lean-model", "lean-prepacked"]
    assert order[3:5] == ["cpp-attention", "cpp-linear"]
    assert "fused-qkv" in order[5:]
    assert "attention-bmm" not in order, "there is nothing to build of it"


def test_nothing_is_built_that_may_not_be_tried() -> None:
    assert not [name for name in names(found(compiler=False)) if name.startswith("cpp-")]
    assert not {"cpp-model", "bf16-linear"} & set(names(found(allowed=Numerics.BIT_IDENTICAL)))
