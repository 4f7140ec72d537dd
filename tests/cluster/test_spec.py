"""Specs and campaign files: defaults, precedence, and one sentence for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.machines import engine_spec
from cluster.plan import pace_for, settings_left_out
from cluster.spec import make_spec, read_campaign_file
from hotpass.errors import InputError
from tests.cluster.campaigns import make_plan

ROOT = Path(__file__).parents[2]


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: a\ntraffic: chat\nconcurrency: 4\nseed: 7\n")
    spec = make_spec({"seed": 9, "threads": None}, str(file))
    assert (spec.model, spec.concurrency, spec.seed, spec.threads, spec.budget) == ("a", 4, 9, 0, "5m")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.toml", "modell = 'x'", "key 'modell' is not known; did you mean 'model'?"),
        ("c.toml", "concurrency = 'four'", "concurrency 'four' is of the wrong type"),
        ("c.yaml", "ray: 1", "is of the wrong type: input should be a valid boolean; write true or false"),
        ("c.toml", "llm = 3", "valid string; write a text in quotes"),
        (
            "c.toml",
            "budget = 5",
            "budget '5' is not a duration: it has no unit; write it as text with a unit: \"5m\", or as",
        ),
        (
            "c.yaml",
            "engine_budget: 90",
            "engine_budget '90' is not a duration: it has no unit; write it as text with a unit: \"90m\"",
        ),
        ("c.toml", "patience = 1.5", 'it has no unit; write it as text with a unit: "1.5m"'),
        ("c.yaml", "llm_turn: true", "is not a duration: it has no unit; write it as 90s, 5m, 1h or 1h30m"),
        ("c.toml", "model = ", "cannot be parsed"),
        ("c.yaml", "- a\n- b", "holds no keys"),
    ],
)
def test_a_wrong_file_is_one_sentence(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as caught:
        read_campaign_file(tmp_path / name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parallelism_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="parallelism '2' is not implemented"):
        make_spec({"model": "m", "traffic": "t", "parallelism": 2})


def test_the_example_file_is_a_spec() -> None:
    spec = make_spec({}, str(ROOT / "examples" / "campaign.toml"))
    assert (spec.model, spec.traffic, spec.budget_seconds) == ("smollm2-135m", "chat", 300)


def test_a_pace_keeps_part_of_the_budget_for_the_claim() -> None:
    short, long = pace_for(60), pace_for(7200)
    assert short.reserve_seconds == pytest.approx(9)
    assert short.cold.alpha == 0.05
    assert long.cold.max_rounds > short.cold.max_rounds
    assert (short.replay_output_tokens, long.replay_output_tokens) == (32, 0)


def test_a_duration_without_a_unit_is_refused_from_python_too() -> None:
    with pytest.raises(InputError, match=r'budget .* has no unit; write it as text with a unit: "5m"'):
        make_spec({"model": "a", "traffic": "chat", "budget": 5})


def test_a_short_search_leaves_compile_modes_out_unless_there_is_little_else() -> None:
    language = {"model": "m", "traffic": "t"}
    assert list(settings_left_out(make_spec({**language, "budget": "6m40s"}))) == ["compile_mode"]
    assert settings_left_out(make_spec({**language, "budget": "10m"})) == {}
    assert settings_left_out(make_spec({"model": "silero-vad", "engine": "module", "budget": "4m"})) == {}


def test_a_short_budget_has_fewer_references_to_wait_for(tmp_path: Path) -> None:
    plans = [make_plan(tmp_path, budget=budget) for budget in ("6m40s", "1h")]
    assert [plan.pace.pool_sets for plan in plans] == [2, 4]
    assert [engine_spec(plan).pool_sets for plan in plans] == [2, 4]
