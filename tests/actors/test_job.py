"""`ray job submit --working-dir . -- hotpass compile …` against a local Ray with its jobs API."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.journal import read_state

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
HEAD = """
import sys
import time
import ray
from ray.job_submission import JobSubmissionClient
port = int(sys.argv[1])
ray.init(address="local", include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=port,
         _node_ip_address="127.0.0.1", object_store_memory=80 * 2**20, num_cpus=2, log_to_driver=False)
client = JobSubmissionClient(f"http://127.0.0.1:{port}")
for attempt in range(600):  # the jobs API answers before the agent that runs jobs has registered
    try:
        client.submit_job(entrypoint="true")
        break
    except RuntimeError as error:
        if "No available agent" not in str(error):
            raise
        time.sleep(0.2)
else:
    print("no job agent registered within two minutes; another Ray head on this machine may hold its port", flush=True)
    sys.exit(1)
print("ready", flush=True)
sys.stdin.read()
ray.shutdown()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_submitted_job_compiles_from_its_working_directory(tmp_path: Path) -> None:
    port = free_port()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=env, cwd=tmp_path,
    )  # fmt: skip
    try:
        assert head.stdout is not None
        while (line := head.stdout.readline()) != "ready\n":
            assert line, "the local Ray did not start"
            assert not line.startswith("no job agent"), line
        submit = [
            sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", f"http://127.0.0.1:{port}", "--working-dir", ".",
            "--", sys.executable, "-m", "cluster.cli", "compile", "--model", "some-model", "--traffic", "chat", "--engine", "fake",
            "--budget", "40s", "--max-attempts", "2", "--no-baselines", "--quiet", "--out", str(tmp_path / "job"),
        ]  # fmt: skip
        done = subprocess.run(submit, capture_output=True, text=True, env=env, cwd=ROOT, timeout=200, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        result = json.loads((tmp_path / "job" / "result.json").read_text())
        assert json.dumps(result["best"]) in done.stdout
        started = read_state(tmp_path / "job").start["engines"][0]
        assert started["pid"] != head.pid
    finally:
        head.communicate("")
