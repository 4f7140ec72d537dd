"""The space: what is in it, what a wide claim switches off, canonical candidates, counting."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hotpass.records.candidate import AS_LOADED, Numerics, PartSource
from hotpass.records.measurement import Tier
from hotpass.records.shapes import Phase
from search.catalogue import find_part
from search.options import build_dials
from search.proposers import alone, lowest_tier, neighbours, screening, serving_steps
from search.space import Space
from tests.search.builders import deployment, part, slot_table

WHOLE = part("whole", ["model"], params={"bits": (32, 4)})
WHOLE_DECODE = part("whole-decode", ["model"], domain="phase == 'decode'")
WHOLE_PREFILL = part("whole-prefill", ["model"], domain="phase == 'prefill'")
LAYER = part("layer", ["model.layers.*"], keeps=("self_attn",))
MLP = part("mlp", ["model.layers.*.mlp"], params={"fuse": (False, True)})
ATTENTION = part("attention", ["model.layers.*.self_attn"])
NARROW = part("narrow", ["model.layers.*.mlp"], numerics="lossy")


def space_of(*parts: PartSource, allowed: Numerics = Numerics.TOLERANCE, **facts: object) -> Space:
    return Space.build(
        deployment(**facts),  # type: ignore[arg-type]
        slot_table(),
        parts,
        allowed=allowed,
        applies=lambda source: None,
    )


def names(space: Space, choices: object) -> set[str]:
    return {use.source.name for use in space.to_candidate(choices).parts}  # type: ignore[arg-type]


def test_places_are_ordered_from_the_widest_claim_to_the_narrowest() -> None:
    space = space_of(MLP, ATTENTION, LAYER, WHOLE)
    assert [place.name for place in space.places] == [
        "model",
        "model.layers.*",
        "model.layers.*.mlp",
        "model.layers.*.self_attn",
    ]


def test_a_wide_claim_switches_off_what_lies_below() -> None:
    space = space_of(WHOLE, MLP, ATTENTION)
    whole = space.options[0]
    asked: list[str] = []

    def suggest(name: str, texts: tuple[str, ...]) -> str:
        asked.append(name)
        return whole.key if name == "model" else texts[0]

    walk = space.walk(suggest)
    assert [use.source.name for use in walk.uses] == ["whole"]
    assert "model.layers.*.mlp" not in asked
    assert "model.layers.*.self_attn" not in asked
    assert "set compile_mode" not in asked, "compiling a forward that no longer runs changes nothing"


def test_a_kept_child_can_still_be_chosen() -> None:
    space = space_of(LAYER, MLP, ATTENTION)
    drawn = {frozenset(names(space, choices)) for choices in space.every()}
    assert drawn == {
        frozenset(),
        frozenset({"layer"}),
        frozenset({"layer", "attention"}),
        frozenset({"mlp"}),
        frozenset({"attention"}),
        frozenset({"mlp", "attention"}),
    }


def test_parts_with_separate_domains_share_a_slot() -> None:
    space = space_of(WHOLE_DECODE, WHOLE_PREFILL, WHOLE)
    drawn = {frozenset(names(space, choices)) for choices in space.every()}
    assert frozenset({"whole-decode", "whole-prefill"}) in drawn
    assert not any({"whole", "whole-decode"} <= found for found in drawn)


def test_no_walk_ends_in_a_conflict() -> None:
    space = space_of(WHOLE, WHOLE_DECODE, LAYER, MLP, ATTENTION, NARROW, allowed=Numerics.LOSSY)
    rng = random.Random(5)
    for _ in range(300):
        walk = space.walk(lambda name, texts: rng.choice(texts))
        for option in walk.options:
            assert not space.clashes(option, [other for other in walk.options if other is not option])


def test_the_policy_leaves_out_parts_and_values_of_a_wider_class() -> None:
    by_value = part(
        "linear", ["model.layers.*.mlp"], params={"act": ("fp32", "int8")}, numerics_when={"act=int8": "lossy"}
    )
    space = space_of(NARROW, by_value)
    assert space.left_out["narrow"] == "is wider than the policy tolerance with every parameter"
    assert [dict(option.params) for option in space.options] == [{"act": ("fp32",)}]
    assert "bfloat16" not in next(dial.values for dial in space.dials if dial.setting.name == "compile_mode")
    assert "kv_dtype" in space.left_out, "bfloat16 is lossy and float32 is what the model has"
    wide = space_of(NARROW, by_value, allowed=Numerics.LOSSY)
    assert dict(wide.options[0].params) in ({"act": ("fp32", "int8")}, {})
    assert next(dial.values for dial in wide.dials if dial.setting.name == "kv_dtype") == ("auto", "bfloat16")


def test_a_combination_that_only_together_is_too_wide_is_not_admitted() -> None:
    both = part("pair", ["model"], params={"a": (0, 1), "b": (0, 1)}, numerics_when={"a=1,b=1": "lossy"})
    space = space_of(both)
    rng = random.Random(0)
    seen = {tuple(use.params.values()) for _ in range(200) for use in space.to_candidate(space.sample(rng)).parts}
    assert seen == {(0, 0), (0, 1), (1, 0)}


def test_parts_for_other_engines_classes_and_slots_are_left_out_with_the_reason() -> None:
    other = part("other", ["model.layers.*.mlp"], replaces="GPT2MLP")
    nowhere = part("nowhere", ["transformer.h.*"])
    space = space_of(other, nowhere)
    assert space.left_out["other"] == "replaces GPT2MLP, but the model has LlamaMLP there"
    assert space.left_out["nowhere"].startswith("claims no slot")


def test_settings_follow_the_machine_and_the_deployment() -> None:
    dials = {dial.setting.name: dial.values for dial in space_of(cores=4, concurrency=4).dials}
    assert dials["threads"] == (None, 1, 2), "4 is what the engine chooses itself"
    assert "cuda_graphs" not in dials
    serving = {dial.setting.name: dial.values for dial in space_of(concurrency=4).serving_dials}
    assert serving["max_batch"] == (0, 1, 2)
    assert serving["chunk_tokens"] == (512, 64, 128, 256, 1024)
    assert "max_batch" in space_of(concurrency=1).left_out


def test_a_setting_that_is_to_be_left_out_is_in_no_candidate_and_says_why() -> None:
    without = {"threads": "for a reason"}
    space = Space.build(deployment(cores=4), slot_table(), (), applies=lambda source: None, without=without)
    assert "threads" in {dial.setting.name for dial in space_of(cores=4).dials}
    assert "threads" not in {dial.setting.name for dial in space.dials}
    assert space.left_out["threads"] == "for a reason"


def test_chunks_that_no_prompt_fills_are_left_out() -> None:
    row = replace(deployment().shapes.rows[0], phase=Phase.PREFILL, num_seqs=1, query_tokens=100, context_max=20)
    short = replace(deployment(concurrency=1), shapes=replace(deployment().shapes, rows=(row,)))
    _, serving, left_out = build_dials(short, Numerics.TOLERANCE, compiler=True, without={})
    assert {dial.setting.name: dial.values for dial in serving} == {"chunk_tokens": (512, 64)}
    assert "max_batch" in left_out


def test_defaults_leave_no_trace_in_a_candidate() -> None:
    space = space_of(MLP)
    assert space.to_candidate({}).id == AS_LOADED.id
    assert space.to_candidate({"set threads": "null"}).id == AS_LOADED.id
    candidate = space.to_candidate({"set threads": "2", "model.layers.*.mlp": space.options[0].key})
    assert candidate.settings == {"threads": 2}
    assert candidate.parts[0].params == {"fuse": False}
    assert candidate.numerics is Numerics.TOLERANCE


def test_choices_of_a_candidate_give_it_back() -> None:
    space = space_of(WHOLE, LAYER, MLP, ATTENTION)
    rng = random.Random(1)
    for _ in range(100):
        candidate = space.to_candidate(space.sample(rng))
        choices = space.choices_of(candidate)
        assert choices is not None
        assert space.to_candidate(choices).id == candidate.id
    assert space_of(MLP).choices_of(space.to_candidate(alone(space, space.options[0], AS_LOADED))) is None


def test_a_choice_that_does_not_exist_is_refused() -> None:
    space = space_of(MLP)
    with pytest.raises(ValueError, match="not one of"):
        space.to_candidate({"model.layers.*.mlp": "mlp@00000000"})


def test_size_counts_what_can_be_reached() -> None:
    # model: 2 parameters. Below: mlp (2) or reference, attention or reference. threads 3; compile 3, which `whole` makes inert.
    space = space_of(WHOLE, MLP, ATTENTION)
    size = space.size()
    assert not size.is_bound
    assert size.candidates == 2 * 3 + (3 * 2) * 3 * 3
    many = [part(f"m{i}", [f"model.layers.{i % 2}.{kind}"]) for i in range(8) for kind in ("mlp", "self_attn")]
    assert space_of(*many).size().is_bound


def test_the_version_changes_with_anything_that_may_be_chosen() -> None:
    versions = {
        space_of(MLP).version,
        space_of(MLP, ATTENTION).version,
        space_of(MLP, cores=8).version,
        space_of(MLP, allowed=Numerics.LOSSY).version,
        space_of(part("mlp", ["model.layers.*.mlp"], params={"fuse": (True, False)})).version,
    }
    assert len(versions) == 5
    assert space_of(MLP, ATTENTION).version == space_of(ATTENTION, MLP).version


def test_screening_tries_each_part_once_alone_widest_first_then_settings() -> None:
    space = space_of(ATTENTION, MLP, WHOLE)
    steps = screening(space, AS_LOADED)
    assert [step.what for step in steps[:3]] == ["whole alone", "attention alone", "mlp alone"]
    assert [names(space, step.choices) for step in steps[:3]] == [{"whole"}, {"attention"}, {"mlp"}]
    assert {step.what for step in steps[3:]} == {
        "threads = 1",
        "threads = 2",
        'compile_mode = "default"',
        'compile_mode = "max-autotune-no-cudagraphs"',
    }


def test_a_part_alone_in_an_incumbent_keeps_what_does_not_clash() -> None:
    space = space_of(WHOLE, MLP, ATTENTION)
    option = {o.source.name: o for o in space.options}
    within = space.to_candidate({**alone(space, option["mlp"], AS_LOADED), "set threads": "2"})
    joined = space.to_candidate(alone(space, option["attention"], within))
    assert {use.source.name for use in joined.parts} == {"mlp", "attention"}
    assert joined.settings == {"threads": 2}
    replaced = space.to_candidate(alone(space, option["whole"], joined))
    assert {use.source.name for use in replaced.parts} == {"whole"}


def test_neighbours_are_one_change_away() -> None:
    space = space_of(WHOLE, MLP, ATTENTION)
    within = space.to_candidate(alone(space, space.options[0], AS_LOADED))
    whats = [step.what for step in neighbours(space, within)]
    assert whats[0] == "whole: bits = 4"
    assert {"with mlp", "with attention", "without whole", "threads = 1", "threads = 2"} == set(whats[1:])
    ids = {space.to_candidate(step.choices).id for step in neighbours(space, within)}
    assert len(ids) == len(whats)
    assert within.id not in ids


def test_serving_settings_are_for_the_slow_tier_alone() -> None:
    space = space_of(MLP)
    rng = random.Random(2)
    assert all("chunk_tokens" not in space.to_candidate(space.sample(rng)).settings for _ in range(50))
    steps = serving_steps(space, AS_LOADED)
    candidate = space.to_candidate(steps[0].choices)
    assert steps[0].what == "chunk_tokens = 64"
    assert lowest_tier(candidate, AS_LOADED) is Tier.SLOW
    onwards = space.to_candidate(alone(space, space.options[0], candidate))
    assert onwards.settings == {"chunk_tokens": 64}, "a part tried in this incumbent keeps its serving settings"
    assert lowest_tier(onwards, candidate) is Tier.FAST


def test_a_parameter_value_that_the_deployment_cannot_serve_is_never_offered() -> None:
    """`gguf` is the first value of the C++ model; where there are no blocks the next admitted value is the default."""
    source = find_part("cpp-model")
    with_blocks = deployment(packed_formats=("Q4_1", "Q8_0"))
    without = deployment(packed_formats=())
    offered = [
        Space.build(where, slot_table(), [source], applies=lambda source: None).options[0].params["weights_as"]
        for where in (with_blocks, without)
    ]
    assert offered == [("gguf", "fp32"), ("fp32",)]


def test_values_that_python_takes_for_equal_are_spelled_each_in_its_own_way() -> None:
    from search.options import spelled

    assert spelled((False, True)) == ("false", "true")
    assert spelled((0, 1)) == ("0", "1")
    assert spelled((0.0, 1.0)) == ("0.0", "1.0")


def test_candidates_share_the_parts_that_they_have_in_common() -> None:
    space = space_of(MLP, ATTENTION)
    found = [choices for choices in space.every() if len(names(space, choices)) == 2]
    made = [space.to_candidate(choices) for choices in found]
    uses = [use for candidate in made for use in candidate.parts]
    assert len(made) > 1
    assert len({id(use) for use in uses}) == 3  # attention, and the MLP in two ways
    assert {candidate.id for candidate in made} == {space_of(MLP, ATTENTION).to_candidate(c).id for c in found}
