"""Campaigns on a real local Ray: actors, recovery from a killed one, addresses where nothing answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.local import connected
from actors.remote import RemoteEngine
from actors.spec import EngineSpec
from cluster.campaign import run_campaign
from cluster.journal import read_state
from cluster.machines import open_machines
from hotpass.errors import EngineDied, InputError, MachineError
from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Assignment, Purpose, Tier
from tests.cluster.campaigns import SHAPES, make_plan, make_running

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with connected("", "hotpass-tests"):
        yield


def test_a_campaign_on_local_actors(local_ray: None, tmp_path: Path) -> None:
    running = make_running(tmp_path / "c", ray=True, max_attempts=4)
    running.open_machines = open_machines
    result = run_campaign(running)
    state = read_state(tmp_path / "c")
    assert result["attempts"] == len(state.search_attempts())
    engine = state.start["engines"][0]
    assert engine["pid"] != os.getpid()
    assert engine["engine"] == "fake-0"
    assert engine["niceness"] == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_killed_engine_is_made_again_for_the_next_order(local_ray: None, tmp_path: Path) -> None:
    engine = RemoteEngine(EngineSpec(kind="fake", name="fake-7"), num_cpus=1.0)
    engine.load(make_plan(tmp_path / "c").deployment, Tier.FAST)
    order = Assignment(
        incumbent=AS_LOADED, candidate=AS_LOADED, tier=Tier.FAST, purpose=Purpose.AA, rows=SHAPES.rows, seed=1, deadline_seconds=5.0
    )  # fmt: skip
    first = engine.facts()["pid"]
    os.kill(first, 9)
    with pytest.raises(EngineDied, match="Ray: "):
        engine.facts()
    assert engine.submit(order).result(60).result.failure is None
    assert engine.facts()["pid"] != first
    engine.close()


def test_more_than_any_node_has_is_an_error_at_once(local_ray: None) -> None:
    with pytest.raises(MachineError, match=r"fake-9 needs a node with 999 CPU; the largest of 1 nodes has"):
        RemoteEngine(EngineSpec(kind="fake", name="fake-9"), num_cpus=999.0)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "--address '127.0.0.1:1' cannot be reached: "),
        ("somewhere", "--address 'somewhere' is not an address"),
    ],
)
def test_an_address_where_nothing_answers_is_bad_input(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(InputError, match=said):
        connected(address, "n").__enter__()
