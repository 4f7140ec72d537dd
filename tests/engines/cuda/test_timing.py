"""Events and the L2 sweep: nothing on a CPU, and on a GPU in the right order (against a stand-in for torch.cuda)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.cuda import level, timing
from engines.cuda.level import allocated_bytes, settle
from engines.cuda.timing import Sweep, device_marks, l2_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the device, in order. Time is 1 s before each event."""
    noted: list[str] = []

    class Event:
        clock = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.clock += 1.0
            self.at = Event.clock
            noted.append("event")

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    def note(name: str) -> Any:
        return lambda *_: noted.append(name)

    monkeypatch.setattr(timing, "_Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", note("empty cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", note("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: noted.append("allocated") or 4096)
    monkeypatch.setattr(level.gc, "collect", note("collect"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 << 20))
    return noted


def test_events_stand_around_idle_devices(calls: list[str]) -> None:
    finish = device_marks(GPU)
    assert calls == ["synchronize", "event"]
    assert finish() == 1.0
    assert calls == ["synchronize", "event", "event", "synchronize"]


def test_what_a_candidate_puts_in_the_events_place_is_not_asked(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("asked the candidate's event"))
    assert device_marks(GPU)() == 1.0


def test_on_a_cpu_nothing_is_asked(calls: list[str]) -> None:
    assert device_marks(CPU)() == 0.0
    settle(CPU)
    assert allocated_bytes(CPU) == 0
    assert l2_bytes(CPU) == 0
    Sweep(CPU)()
    assert calls == []


def test_the_level_is_what_is_left_when_all_was_given_back(calls: list[str]) -> None:
    assert allocated_bytes(GPU) == 4096
    assert calls == ["collect", "synchronize", "workspaces", "empty cache", "allocated"]


def test_a_sweep_writes_over_twice_the_cache(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    empty = torch.empty

    def on_cpu(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert (size, device) == (100 << 20, GPU)
        made.append(empty(1000, dtype=dtype).fill_(7))
        return made[0]

    monkeypatch.setattr(timing.torch, "empty", on_cpu)
    Sweep(GPU)()
    assert int(made[0].sum()) == 0
