"""What faulty candidates start, write and hold is gone, and the next one is served; how soon, `make bench-reload` says."""

from __future__ import annotations

import os

import psutil
import pytest

from engines.decoder_engine import DecoderEngine
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind
from tests.engines.conftest import assignment, candidate
from tests.engines.test_faults import served_again

DEADLINE = 2.0

CROWD = """
def crowd(depth):
    for _ in range(3 if depth else 0):
        if os.fork() == 0:
            os.setsid()
            crowd(depth - 1)
            time.sleep(600)
            os._exit(0)
crowd(3)
"""
"""Three generations of processes, each in a session of its own: 39 of them."""

RABBIT = """
if os.fork() == 0:
    while True:
        os.setsid()
        if os.fork():
            os._exit(0)
"""
"""One process that is another one every time somebody looks."""

FAULTS = {
    "crowd, then exit": (CROWD + "os._exit(1)", FailureKind.CRASH),
    "crowd, then a loop": (CROWD + "while True: pass", FailureKind.TIMEOUT),
    "rabbit": (RABBIT + "os._exit(1)", FailureKind.CRASH),
    "deadlock": ("lock = threading.Lock()\nlock.acquire()\nlock.acquire()", FailureKind.TIMEOUT),
    "deadlock of threads": (
        "a = threading.Event()\nt = threading.Thread(target=a.wait)\nt.start()\nt.join()",
        FailureKind.TIMEOUT,
    ),
    "signals ignored": (
        "import signal\n[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\nwhile True: time.sleep(60)",
        FailureKind.TIMEOUT,
    ),
    "gigabytes of output": (
        "text = 'y' * (1 << 20)\nfor _ in range(2048): print(text)\nos._exit(1)",
        FailureKind.CRASH,
    ),
    "many files": (
        "[open(f'file-{n}', 'w').write('x') for n in range(2000)]\nos._exit(1)",
        FailureKind.CRASH,
    ),
    "memory of many kinds": (
        "import mmap\nheld = []\nwhile True: held.append(mmap.mmap(-1, 1 << 26, flags=mmap.MAP_PRIVATE))",
        FailureKind.MEMORY,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_left_and_the_next_is_served(fault: str, toy: DecoderEngine, deployment: Deployment) -> None:
    body, kind = FAULTS[fault]
    folder = os.readlink(f"/proc/{toy._loaded.pair().child.pid}/cwd")
    assert os.path.isdir(folder)
    keeper, zygote = toy._loaded.keeper.pid, toy._loaded.zygote.pid
    result = toy.measure(assignment(deployment, candidate(body), deadline_seconds=DEADLINE))
    assert result.failure is not None
    assert result.failure.kind is kind, result.failure
    below = psutil.Process(zygote).children(recursive=True)
    assert len(below) <= 1, "at most the next child"
    served_again(toy, deployment, keeper)
    assert toy._loaded.zygote.pid == zygote
    assert result.clean is not None
    assert os.path.exists(folder) is not result.clean.child_replaced
