"""`hotpass ui DIR`: MLflow's own UI on a campaign folder, ready when its address is printed.

    catch up the mirror (nobody else writes) ─► mlflow server on 127.0.0.1 ─► answers the browser's own questions ─► print ─► wait

The server and its workers are one process group, made here and ended here; nothing else is touched. What is not here: what the
runs show (`cluster.runs`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from cluster.ledger import catch_up
from cluster.plan import read_plan
from cluster.runs import ATTEMPTS_VIEW, CAMPAIGNS_VIEW, facts_of
from hotpass.errors import InputError, MachineError

START_SECONDS = 180.0
"""A start beside seven other busy processes on two cores took 57 s; this is when it counts as failed."""
STOP_SECONDS = 5.0
"""For an end on request; then it is forced."""
LOG = "mlflow-server.log"


class UiServer:
    """A running MLflow server over one campaign. Made by `start_ui`; `close` ends it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.url = url
        """Address of the table of attempts, fastest first."""
        self.campaign_url = url
        """Address of the campaign's own charts."""
        self.log = log
        self._process = process

    def wait(self) -> int:
        """Until the server ends by itself; its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """End the server and its workers, kindly first. The group is watched, since a worker may outlive its leader."""
        for stop in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, stop)
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline:
                self._process.poll()
                if not _group_lives(self._process.pid):
                    return
                time.sleep(0.05)

    def __enter__(self) -> UiServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_ui(folder: Path, *, port: int = 0, host: str = "127.0.0.1") -> UiServer:
    """Start the server and return once the page and its table can be loaded.

    `port` 0 takes a free one. Raises InputError when the folder has no MLflow store or the port is taken, MachineError when the
    server does not come up (its log says why).
    """
    folder = Path(folder).resolve()
    store = folder / "mlflow.db"
    if not store.is_file():
        problem = "has no mlflow.db"
        raise InputError(
            "campaign", folder, problem, "give a campaign folder; one mirrored to a server is seen at that server"
        )
    port = _free_port(host, port)
    names = [f"{name}:{port}" for name in dict.fromkeys((host, "127.0.0.1", "localhost"))]
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{store}", "--default-artifact-root", (folder / "mlartifacts").as_uri(),
        "--allowed-hosts", ",".join(names), "--cors-allowed-origins", ",".join(f"http://{name}" for name in names),
    ]  # fmt: skip
    # Its runner of evaluation jobs, half a dozen processes, has nothing to do for a campaign.
    lean = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **lean}
    log = folder / LOG
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    server = UiServer(process, "", log)
    try:
        experiment = _until_it_answers(process, f"http://{host}:{port}", names, log)
    except BaseException:
        server.close()
        raise
    server.url = server.campaign_url = f"http://{host}:{port}"
    if experiment:
        runs = f"{server.url}/#/experiments/{experiment}/runs?viewStateShareKey="
        server.url, server.campaign_url = f"{runs}{ATTEMPTS_VIEW}", f"{runs}{CAMPAIGNS_VIEW}&compareRunsMode=CHART"
    return server


def serve_ui(folder: Path, *, port: int = 0, say: Callable[[str], None] = print) -> int:
    """The command: mirror what a dead campaign left, start, say where, run until Ctrl-C; returns the exit code.

    Raises InputError for a folder that is no campaign, or one that is mirrored to a server (where it is seen).
    """
    plan = read_plan(Path(folder))
    if plan.spec.tracking_uri:
        raise InputError("campaign", folder, f"is mirrored to {plan.spec.tracking_uri}", "open that address")
    say(f"starting MLflow on {Path(folder).resolve()} …")
    catch_up(Path(folder), facts_of(plan))
    with start_ui(folder, port=port) as server:
        say(f"MLflow is ready (Ctrl-C ends it)\n  attempts  {server.url}\n  campaign  {server.campaign_url}")
        try:
            return server.wait()
        except KeyboardInterrupt:
            return 0


def _until_it_answers(process: subprocess.Popen[bytes], address: str, names: list[str], log: Path) -> str:
    """Poll health, the page, and the API under every name that is allowed; the id of the campaign's experiment, or empty."""
    deadline = time.monotonic() + START_SECONDS
    problem = "no answer"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise MachineError(f"the MLflow server ended with {process.returncode}: {_tail(log)}")
        try:
            _get(f"{address}/health", names[0])
            _get(f"{address}/", names[0])
            for name in names:
                found = _get(f"{address}/ajax-api/2.0/mlflow/experiments/search", name, {"max_results": 100})
            experiments = json.loads(found).get("experiments", [])
            own = [item["experiment_id"] for item in experiments if item["experiment_id"] != "0"]
            return str(own[0]) if own else ""
        except urllib.error.HTTPError as error:
            problem = f"{error.code} for {error.url}"
        except (OSError, ValueError) as error:
            problem = str(error)
        time.sleep(0.2)
    raise MachineError(f"the MLflow server did not answer within {START_SECONDS:.0f} s ({problem}): {_tail(log)}")


def _get(url: str, name: str, body: dict[str, object] | None = None) -> bytes:
    """As a browser that opened the page under `name` would ask."""
    headers = {"Host": name, "Origin": f"http://{name}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body).encode() if body else None, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        content: bytes = answer.read()
    return content


def _free_port(host: str, port: int) -> int:
    """The port if it can be bound, or any that can. Raises InputError."""
    if not 0 <= port <= 65535:
        raise InputError("--port", port, "is no port", "give one from 1 to 65535, or leave it out")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                "--port", port, f"cannot be used ({error.strerror})", "give another, or leave it out"
            ) from None
        return int(probe.getsockname()[1])


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])
    return "no log"
