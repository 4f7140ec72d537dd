"""`ray job submit --working-dir . -- hotpass compile …` against a local Ray with its jobs API."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.journal import read_state

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
READY_SECONDS = 120.0
"""For the jobs API to answer, and for the agent that runs jobs to register."""


def free_port() -> int:
    """Below the ports that outgoing connections take: one of those could take it before Ray does."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("a hundred ports, none of them free")


@contextlib.contextmanager
def local_ray(env: dict[str, str], log: Path) -> Iterator[int]:
    """The dashboard's port of a Ray head with ports of its own."""
    port = free_port()
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=2",
        f"--port={free_port()}", "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}",
        f"--dashboard-agent-listen-port={free_port()}", f"--object-store-memory={80 << 20}", "--disable-usage-stats",
    ]  # fmt: skip
    with log.open("w") as file:
        head = subprocess.Popen(command, stdout=file, stderr=file, env=env, cwd=log.parent, start_new_session=True)
        try:
            yield port
        finally:
            head.terminate()  # it ends its processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)
            head.wait()


def submitted(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The job's end; submitted again while Ray is not ready for jobs."""
    end = time.monotonic() + READY_SECONDS
    while True:
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=200, check=False)
        said = done.stdout + done.stderr
        early = "No available agent" in said or "Failed to connect to Ray" in said
        if done.returncode == 0 or not early or time.monotonic() > end:
            return done


def test_a_submitted_job_compiles_from_its_working_directory(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with local_ray(env, tmp_path / "ray.log") as port:
        submit = [
            sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", f"http://127.0.0.1:{port}", "--working-dir", ".",
            "--", sys.executable, "-m", "cluster.cli", "compile", "--model", "some-model", "--traffic", "chat", "--engine", "fake",
            "--budget", "40s", "--max-attempts", "2", "--no-baselines", "--quiet", "--out", str(tmp_path / "job"),
        ]  # fmt: skip
        done = submitted(submit, env)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result = json.loads((tmp_path / "job" / "result.json").read_text())
    assert json.dumps(result["best"]) in done.stdout
    started = read_state(tmp_path / "job").start["engines"][0]
    assert started["pid"] != os.getpid()
