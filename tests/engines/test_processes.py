"""A candidate that multiplies meets a ceiling, by the kernel or by the zygote's eye, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from engines.decoder_engine import DecoderEngine
from engines.limits import ChildLimits
from engines.processes import PidsGroup, Watch
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind, Tier
from tests.engines.conftest import MEMORY_LIMIT, assignment, candidate, toy_engine
from tests.engines.test_faults import served_again

MOST = 48
GROWS = """
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
    except OSError:
        time.sleep(600)
    time.sleep(0.004)
"""
"""Processes without end, each in a session of its own, so that no signal to a group finds them."""
DOUBLES = """
while True:
    try:
        os.fork()
        os.setsid()
    except OSError:
        pass
"""
"""The bomb itself; only for a kernel that stops it."""


@pytest.fixture(scope="module", params=["toy_program", "unlimited_program"])
def engine(request: pytest.FixtureRequest, deployment: Deployment) -> Iterator[DecoderEngine]:
    limits = ChildLimits(memory_bytes=MEMORY_LIMIT, extra_processes=MOST)
    with toy_engine(limits=limits, program=f"{request.param}:ToyProgram") as made:
        made.load(deployment, Tier.FAST)
        yield made


def held_by_the_kernel(engine: DecoderEngine) -> bool:
    return engine.facts["processes"].startswith("at most 48")


@pytest.mark.parametrize("body", [GROWS, DOUBLES], ids=["grows", "doubles"])
def test_a_fork_bomb_ends_with_its_child(body: str, engine: DecoderEngine, deployment: Deployment) -> None:
    if body is DOUBLES and not held_by_the_kernel(engine):
        pytest.skip("nothing but a look every tenth of a second limits children here")
    keeper, zygote = engine._loaded.keeper.pid, engine._loaded.zygote.pid
    result = engine.measure(assignment(deployment, candidate(body), deadline_seconds=3.0))
    assert result.failure is not None
    assert result.failure.kind is (FailureKind.TIMEOUT if held_by_the_kernel(engine) else FailureKind.CRASH)
    assert len(psutil.Process(zygote).children(recursive=True)) <= 1, "at most the next child"
    served_again(engine, deployment, keeper)
    assert engine._loaded.zygote.pid == zygote


def test_what_limits_children_is_said(engine: DecoderEngine) -> None:
    told = engine.facts["processes"]
    assert told.startswith(("at most 48 (pids cgroup)", "at most 48 more (RLIMIT_NPROC)", "watched, ended beyond 48"))


def test_a_group_ends_what_is_in_it_and_goes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    group = PidsGroup.new(8)
    if group is None:
        pytest.skip("no pids cgroup may be made here")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=group.enter)
    assert group.pids() == [process.pid]
    group.end()
    assert process.wait() == -9
    assert group.pids() == []
    group.remove()
    assert not group._folder.exists()


def test_a_watch_counts_the_childs_own_and_not_the_machines() -> None:
    sleepers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(3)]
    try:
        mine = {process.pid for process in psutil.Process().children()}
        watch = Watch(2)
        watch._alarm = 0  # as if the machine had grown
        assert not watch.has_too_many(sleepers[0].pid, mine)
        assert watch._alarm > 2
        watch._alarm = 0
        assert watch.has_too_many(sleepers[0].pid, mine - {sleepers[1].pid, sleepers[2].pid}), "two orphans and itself"
    finally:
        for process in sleepers:
            process.kill()
            process.wait()


def test_groups_of_zygotes_that_were_killed_are_swept() -> None:
    group = PidsGroup.new(8)
    if group is None:
        pytest.skip("no pids cgroup may be made here")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = group._folder.with_name(f"hotpass-{dead.pid}-0")
    left.mkdir(exist_ok=True)
    os.utime(left, (time.time() - 3600,) * 2)
    group.remove()
    other = PidsGroup.new(8)
    assert other is not None
    other.remove()
    assert not left.exists()
