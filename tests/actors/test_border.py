"""What Ray leaves to its user: errors translated, demands that nobody can meet, versions that differ, answers that never come."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from actors.errors import DIED, OTHER, translated
from actors.remote import check_feasible, check_versions, watched
from hotpass.errors import EngineDied, InputError, MachineError

NODES = [
    {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}},
    {"Alive": True, "Resources": {"CPU": 8.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
]
FACTS = {"host": "a", "python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "hotpass": "0.1.0"}


def test_every_error_of_ray_has_a_translation() -> None:
    from ray import exceptions

    known = {
        name
        for name in dir(exceptions)
        if isinstance(kind := getattr(exceptions, name), type)
        and issubclass(kind, exceptions.RayError)
        and kind is not exceptions.RayError
    }
    assert known == set(DIED) | set(OTHER)
    assert not set(DIED) & set(OTHER)


def test_errors_come_out_as_ours() -> None:
    from ray import exceptions

    ours = InputError("model", "x", "is not there", "give another")
    assert translated(exceptions.RayTaskError("f", "tb", ours)) is ours
    assert isinstance(translated(exceptions.RayTaskError("f", "tb", ValueError("odd"))), MachineError)
    assert type(translated(exceptions.ActorDiedError())) is EngineDied
    assert type(translated(exceptions.GetTimeoutError("late"))) is MachineError
    other = KeyError("k")
    assert translated(other) is other


@pytest.mark.parametrize("demand", [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 8.0}])
def test_a_demand_that_one_node_meets_is_feasible(demand: dict[str, float]) -> None:
    check_feasible(NODES, demand, "engine")


def test_an_infeasible_demand_is_named_with_the_capacity() -> None:
    with pytest.raises(
        MachineError, match=r"engine needs a node with 4 CPU, 2 GPU; the largest of 2 nodes has 8 CPU, 1 GPU"
    ):
        check_feasible(NODES, {"CPU": 4.0, "GPU": 2.0}, "engine")


def test_cpus_of_one_node_and_gpus_of_another_do_not_add_up() -> None:
    with pytest.raises(MachineError, match="needs a node with 8 CPU, 1 GPU"):
        check_feasible(NODES, {"CPU": 8.0, "GPU": 1.0}, "engine")


def test_other_versions_on_a_node_are_shown_as_a_table() -> None:
    check_versions(FACTS, {**FACTS, "host": "b"}, "engine")
    with pytest.raises(MachineError) as caught:
        check_versions(FACTS, {**FACTS, "host": "b", "torch": "2.12.0"}, "decoder-0")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("decoder-0 on b has another torch than this process")
    assert any(line.split() == ["torch", "2.13.0", "2.12.0"] for line in lines)


def test_an_answer_that_never_comes_kills_the_actor() -> None:
    killed, source = threading.Event(), Future[Any]()
    watched(source, 0.0, killed.set, lambda: None)
    assert killed.wait(10)


def test_an_answer_in_time_is_passed_on_and_a_death_reported() -> None:
    from ray import exceptions

    lost: list[bool] = []
    source: Future[int] = Future()
    target = watched(source, 60.0, lambda: None, lambda: lost.append(True))
    source.set_result(7)
    assert (target.result(5), lost) == (7, [])
    dying: Future[int] = Future()
    target = watched(dying, 60.0, lambda: None, lambda: lost.append(True))
    dying.set_exception(exceptions.ActorDiedError())
    with pytest.raises(EngineDied):
        target.result(5)
    assert lost == [True]
