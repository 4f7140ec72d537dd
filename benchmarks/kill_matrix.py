"""Kills, one process at a time at a random moment, and what is left: `python -m benchmarks.kill_matrix [--moments 5]`.

    campaign on real processes (Ray actors, MLflow server) ─► SIGKILL one of them, or a full disk ─► end, resume ─► the log, held
    against what was acknowledged before: attempts lost, counted twice, MLflow runs that are still RUNNING

Nine victims: engine, builder, proposer and board are Ray actors; the driver is the process of the campaign; the recorder is two halves in
that process, of which this kills the one that mirrors, at a moment counted in runs that MLflow has; the MLflow server is a process of its
own; the full disk is a limit on the size of files. For these the engine is the fake one: what dies is real. A child is a process of the
decoder engine on a tiny random model, forked from its zygote, killed while it measures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import psutil

from benchmarks.search_campaigns import scratch
from cluster.events import read_events
from cluster.journal import FOLDER
from cluster.ledger import import_mlflow
from engines.prepare.tiny import make_tiny_model
from hotpass.records.measurement import Purpose
from search.agents.scripted import Say, ScriptedServer, in_turn

COUNTS = ("lost", "doubled", "running")
TRIES = 3
ATTEMPTS = 40
ATTEMPTS_OF_CHILDREN = 8
"""Of a campaign on the decoder engine: each takes seconds."""
SERVER_SECONDS = 300
"""For an MLflow server to begin on a busy machine."""
ACTORS = {"engine": "EngineServer", "builder": "BuilderServer", "proposer": "ProposerServer", "board": "BoardServer"}
VICTIMS = (*ACTORS, "child", "driver", "recorder", "mlflow", "disk")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=5)
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--at-once", type=int, default=2, help="kills under way at a time (default 2)")
    options = parser.parse_args()
    found = kill_matrix(options.victims.split(","), options.moments, at_once=options.at_once)
    print(json.dumps(found))
    sys.exit(0 if is_clean(found) else 1)


def is_clean(found: dict[str, Any]) -> bool:
    """Nothing lost, doubled or left running, by kills each of which met its victim."""
    return not any(found[name] for name in (*COUNTS, "missed", "errors", "interrupted"))


def kill_matrix(victims: list[str], moments: int, seed: int = 0, at_once: int = 2) -> dict[str, Any]:
    """Sums over all kills: attempts lost and doubled, runs left RUNNING; by victim the kills that met it; those that did not, and those
    that could not be carried out, by name. What is known by then when it is interrupted."""
    total, met = Counter[str](), Counter[str]()
    missed, errors = list[str](), list[str]()
    interrupted = False
    pool = ThreadPoolExecutor(at_once)
    kills = {
        pool.submit(_met, victim, f"{seed}-{victim}-{moment}"): f"{victim} {moment}"
        for moment in range(moments)
        for victim in victims
    }
    try:
        for future in as_completed(kills):
            name = kills[future]
            try:
                found = future.result()
            except Exception as error:
                errors.append(f"{name}: {type(error).__name__}: {error}")
                print(errors[-1], file=sys.stderr, flush=True)
                continue
            total.update({count: found[count] for count in COUNTS})
            met[name.split()[0]] += found["met"]
            missed += [] if found["met"] else [name]
            print(f"{name}: {found}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    sums = {count: total[count] for count in COUNTS}
    return {**sums, "kills": dict(met), "missed": missed, "errors": errors, "interrupted": interrupted}


def _met(victim: str, draw: str) -> dict[str, int]:
    """One kill; again at another moment when the campaign was over before its victim was met. Every try counts."""
    total = Counter[str]()
    for again in range(TRIES):
        with scratch() as folder:
            total.update(one_kill(folder, victim, random.Random(f"{draw}-{again}")))
        if total["met"]:
            break
    return {name: total[name] for name in (*COUNTS, "met")}


def one_kill(folder: Path, victim: str, draw: random.Random) -> dict[str, int]:
    """Start, kill, end, resume to the result, and count."""
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(ScriptedServer(in_turn([Say("nothing to propose", delay_seconds=0.2)])))
        uri, server = "", None
        if victim == "mlflow":
            server, uri = _mlflow_server(folder.parent)
            stack.callback(_end, server)
        command = _command(folder, victim, llm.url, uri)
        limit = _limited(draw.randrange(120_000, 400_000)) if victim == "disk" else None
        campaign = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=limit)
        met = _strike(campaign, folder, victim, server, draw)
        code = campaign.wait(timeout=300)
        if victim == "disk":
            met = code != 0
        acknowledged = _attempts(folder)
        if server is not None:
            _end(server)
            server, _ = _mlflow_server(folder.parent, int(uri.rsplit(":", 1)[1]))
            stack.callback(_end, server)
        resumed = [sys.executable, "-m", "cluster.cli", "compile", "--resume", str(folder), "--quiet"]
        subprocess.run(resumed, check=True, stdout=subprocess.DEVNULL, timeout=600)
        after = _attempts(folder)
        running = _running(uri or f"sqlite:///{(folder / 'mlflow.db').resolve()}")
    doubled = sum(count - 1 for count in Counter(after).values())
    return {"lost": len(set(acknowledged) - set(after)), "doubled": doubled, "running": running, "met": int(met)}


def _command(folder: Path, victim: str, llm_url: str, uri: str) -> list[str]:
    command = [sys.executable, "-m", "cluster.cli", "compile", "--traffic", "chat"]
    if victim == "child":
        model = make_tiny_model(folder.parent / "model")
        command += ["--engine", "decoder", "--model", str(model), "--requests", "20", "--budget", "4m"]
    else:
        command += ["--engine", "fake", "--model", "fake", "--budget", "2h"]
    command += ["--max-attempts", str(_most(victim)), "--no-baselines", "--quiet", "--out", str(folder)]
    if victim not in ACTORS:
        command += ["--no-ray"]
    if victim in ("proposer", "board"):
        command += [
            "--agents",
            "1",
            "--llm",
            "openai/scripted",
            "--llm-api-base",
            llm_url,
            "--llm-max-tokens",
            "1000000",
        ]
    return [*command, "--tracking-uri", uri] if uri else command


def _strike(
    campaign: subprocess.Popen[bytes],
    folder: Path,
    victim: str,
    server: subprocess.Popen[bytes] | None,
    draw: random.Random,
) -> bool:
    """Kill the victim after a random number of acknowledged attempts, and a moment; True when it was alive, and the campaign too.

    The campaign's own process is stopped meanwhile: it would be over before its actors are found.
    """
    after, moment = draw.randrange(1, _most(victim) // 2), draw.uniform(0.0, 0.1)
    count = _mirrored if victim == "recorder" else _searched
    while campaign.poll() is None and count(folder) < after:
        time.sleep(0.005)
    if victim == "disk":
        return False  # the limit strikes by itself: whether it did, the campaign's exit code says
    time.sleep(moment)
    if victim == "child":
        return _kill_child(campaign)
    if campaign.poll() is not None:
        return False
    campaign.send_signal(signal.SIGSTOP)
    try:
        return _kill(campaign, victim, server)
    finally:
        campaign.send_signal(signal.SIGCONT)


def _kill(campaign: subprocess.Popen[bytes], victim: str, server: subprocess.Popen[bytes] | None) -> bool:
    """True when there was one to kill."""
    if victim in ("driver", "recorder"):
        campaign.kill()
        return True
    if victim == "mlflow":
        assert server is not None
        alive = server.poll() is None
        _end(server)
        return alive
    actors = [p for p in psutil.Process(campaign.pid).children(recursive=True) if _names(p, ACTORS[victim])]
    for process in actors:
        process.kill()
    return bool(actors)


def _most(victim: str) -> int:
    return ATTEMPTS_OF_CHILDREN if victim == "child" else ATTEMPTS


def _kill_child(campaign: subprocess.Popen[bytes]) -> bool:
    """One of those that a zygote forked, the youngest: the one that has a candidate. Looked for until the campaign ends."""
    while campaign.poll() is None:
        zygotes = [p for p in psutil.Process(campaign.pid).children(recursive=True) if _names(p, "engines.zygote")]
        children = [child for zygote in zygotes for child in _children(zygote)]
        if children:
            children[-1].kill()
            return True
        time.sleep(0.02)
    return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:
        return []


def _names(process: psutil.Process, actor: str) -> bool:
    try:
        return any(actor in word for word in process.cmdline())
    except psutil.Error:
        return False


def _attempts(folder: Path) -> list[int]:
    """Assignments that have an attempt, as often as they have."""
    if not (folder / FOLDER).exists():
        return []
    return [int(e.payload["assignment"]) for e in read_events(folder / FOLDER) if e.kind == "attempt"]


def _searched(folder: Path) -> int:
    """Attempts of the search; A/A, which comes before agents and builders have anything to do, is not one."""
    if not (folder / FOLDER).exists():
        return 0
    attempts = [e.payload["attempt"] for e in read_events(folder / FOLDER) if e.kind == "attempt"]
    return sum(attempt["purpose"] != Purpose.AA for attempt in attempts)


def _mirrored(folder: Path) -> int:
    """Runs that the campaign's own MLflow store has."""
    store = folder / "mlflow.db"
    if not store.exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
            return int(database.execute("SELECT count(*) FROM runs").fetchone()[0])
    except sqlite3.Error:
        return 0


def _running(uri: str) -> int:
    client = import_mlflow().MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return len(client.search_runs(experiments, "attributes.status = 'RUNNING'")) if experiments else 0


def _mlflow_server(folder: Path, port: int = 0) -> tuple[subprocess.Popen[bytes], str]:
    """`mlflow server` on SQLite in that folder, once it answers."""
    import urllib.request

    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
    store = f"sqlite:///{(folder / 'server.db').resolve()}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(folder / "server-artifacts")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # half a dozen processes without work
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    uri = f"http://127.0.0.1:{port}"
    for _ in range(SERVER_SECONDS * 10):
        try:
            urllib.request.urlopen(f"{uri}/health", timeout=1).read()
            return server, uri
        except OSError:
            time.sleep(0.1)
    _end(server)
    raise TimeoutError(f"the MLflow server did not answer within {SERVER_SECONDS} s")


def _end(server: subprocess.Popen[bytes]) -> None:
    """With its workers; a second call does nothing."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _limited(num_bytes: int) -> Callable[[], None]:
    """No file of the child may grow beyond that: writes fail as on a full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return limit


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if shutil.which("ray") is None:
        print("ray is not on the path; the actors are started by its Python interface", file=sys.stderr)
    main()
