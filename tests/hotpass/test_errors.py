"""The one sentence that wrong input gets."""

from __future__ import annotations

from hotpass.errors import LISTED, InputError, nearest


def test_the_nearest_spelling_is_named_and_the_list_stays_readable() -> None:
    assert nearest("thread", ["threads", "seed"]) == "did you mean 'threads'? known: seed, threads"
    assert nearest("xyz", ["threads", "seed"]) == "known: seed, threads"
    many = [f"layer.{index:03d}" for index in range(300)]
    said = nearest("layer.2990", many)
    assert said.startswith("did you mean 'layer.299'? known: layer.000, ")
    assert said.endswith(f"layer.{LISTED - 1:03d}, … (300 in all)")


def test_an_input_error_is_one_sentence_with_exit_code_2() -> None:
    error = InputError("budget", "soon", "is not a duration", "write it as 5m")
    assert str(error) == "budget 'soon' is not a duration; write it as 5m"
    assert error.exit_code == 2
