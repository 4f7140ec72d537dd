"""What a proposer submits becomes one canonical candidate, or one sentence that says why not."""

from __future__ import annotations

import pytest

from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Numerics, PartSource
from search.agents.compose import Composer
from search.agents.tools import PartArgument
from tests.search.builders import deployment, part, slot_table

MLP = part("mlp", ["model.layers.*.mlp"], params={"tile": [16, 32]})
OTHER_MLP = part("other-mlp", ["model.layers.*.mlp"])
ATTENTION = part("attention", ["model.layers.*.self_attn"])
LAYER = part("layer", ["model.layers.*"])
KNOWN = {source.name: source for source in (MLP, OTHER_MLP, ATTENTION, LAYER)}


@pytest.fixture
def composer() -> Composer:
    return Composer(deployment(), slot_table(), allowed=Numerics.TOLERANCE, compiler=True)


def asked(source: PartSource, **params: int) -> PartArgument:
    return PartArgument(name=source.name, params=dict(params))


def test_a_part_goes_onto_a_candidate_whose_parts_stay_where_there_is_room(composer: Composer) -> None:
    first = composer.composed(AS_LOADED, composer.sources([asked(MLP, tile=32)], KNOWN), {"threads": 2})
    both = composer.composed(first, composer.sources([asked(ATTENTION)], KNOWN), {})
    assert {use.source.name: dict(use.params) for use in both.parts} == {"attention": {}, "mlp": {"tile": 32}}
    assert both.settings == {"threads": 2}
    replaced = composer.composed(both, composer.sources([asked(OTHER_MLP)], KNOWN), {})
    assert [use.source.name for use in replaced.parts] == ["other-mlp", "attention"]
    wide = composer.composed(both, composer.sources([asked(LAYER)], KNOWN), {"threads": None})
    assert (wide.label, dict(wide.settings)) == ("layer", {})


def test_a_new_part_and_a_known_one_make_the_same_candidate_as_both_known(composer: Composer) -> None:
    new = PartArgument(name="mlp", source=MLP.text())
    a = composer.composed(AS_LOADED, composer.sources([new, asked(ATTENTION)], {"attention": ATTENTION}), {})
    b = composer.composed(AS_LOADED, composer.sources([asked(ATTENTION), asked(MLP)], KNOWN), {})
    assert a.id == b.id
    assert composer.reason_against(a) == ""


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (PartArgument(name="nil"), "part 'nil' is not known; give its source"),
        (PartArgument(name="x", source="def f(:"), "is not Python"),
        (PartArgument(name="x", source="import torch"), "0 classes with @part"),
        (PartArgument(name="mlp", params={"tile": 64}), "use one of \\[16, 32\\]"),
        (
            PartArgument(name="x", source=part("x", ["model.layers.*.mpl"]).text()),
            "claims no slot of this engine .*did you mean 'model.layers..\\.mlp'",
        ),
        (PartArgument(name="x", source=part("x", ["model"], numerics="lossy").text()), "wider than the policy"),
        (PartArgument(name="x", source=part("x", ["model"], device="cuda").text()), "needs device cuda"),
        (PartArgument(name="x", source=part("x", ["model.layers.*.mlp"], replaces="GemmaMLP").text()), "GemmaMLP"),
    ],
)
def test_what_cannot_be_proposed_is_refused_in_one_sentence(
    composer: Composer, argument: PartArgument, says: str
) -> None:
    with pytest.raises(InputError, match=says) as raised:
        composer.composed(AS_LOADED, composer.sources([argument], KNOWN), {})
    assert "\n" not in str(raised.value)


def test_parts_that_clash_and_settings_that_change_nothing_are_refused(composer: Composer) -> None:
    with pytest.raises(InputError, match="covers slots that layer covers too"):
        composer.composed(AS_LOADED, composer.sources([asked(LAYER), asked(MLP)], KNOWN), {})
    with pytest.raises(InputError, match="covers slots that mlp covers too"):
        composer.composed(AS_LOADED, composer.sources([asked(MLP), asked(OTHER_MLP)], KNOWN), {})
    with pytest.raises(InputError, match="setting kv_dtype 'bfloat16' changes nothing"):
        composer.composed(AS_LOADED, [], {"kv_dtype": "bfloat16"})
    with pytest.raises(InputError, match="is not known"):
        composer.composed(AS_LOADED, [], {"policy": "lossy"})
