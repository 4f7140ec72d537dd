"""`hotpass ui`: one real MLflow server over a real store, seen as a browser sees it, and gone afterwards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from cluster.ledger import open_mirror
from cluster.ui import UiServer, start_ui
from hotpass.errors import InputError
from tests.cluster.written import FACTS, no_trouble, write_campaign


def fetch(url: str, host: str, body: object | None = None) -> bytes:
    headers = {"Host": host, "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body).encode() if body else None, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        content: bytes = answer.read()
    return content


def members(group: int) -> list[int]:
    """Processes of a process group that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_the_ui_answers_under_every_name_it_allows_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_campaign(tmp_path).log.close()
    assert open_mirror(tmp_path, FACTS, note=no_trouble).close()
    with start_ui(tmp_path) as server:
        address, _, page = server.url.partition("/#")
        port = address.rsplit(":", 1)[1]
        group = os.getpgid(server._process.pid)
        assert group == server._process.pid != os.getpgid(0), "a process group of its own"
        assert page == "/experiments/1/runs?viewStateShareKey=hotpass-attempts"
        assert b"<html" in fetch(f"{address}/", f"127.0.0.1:{port}").lower()
        for name in (f"127.0.0.1:{port}", f"localhost:{port}"):
            body = {"experiment_ids": ["1"], "filter": "tags.role = 'campaign'"}
            found = json.loads(fetch(f"{address}/ajax-api/2.0/mlflow/runs/search", name, body))
            assert [run["info"]["run_name"] for run in found["runs"]] == ["tiny-chat"]
        with pytest.raises(urllib.error.HTTPError):
            fetch(f"{address}/ajax-api/2.0/mlflow/experiments/search", "evil.example:80", {"max_results": 1})
        assert members(group)
    assert members(group) == []


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no mlflow\.db"):
        start_ui(tmp_path)


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot be used"):
            start_ui(tmp_path, port=taken.getsockname()[1])
    for port in (-1, 65536):
        with pytest.raises(InputError, match="is no port"):
            start_ui(tmp_path, port=port)


def test_only_its_own_group_is_ended(tmp_path: Path) -> None:
    """A server whose leader is gone but whose worker hangs is still ended; a stranger beside it is not."""
    code = (
        "import subprocess, sys, signal\n"
        "child = 'import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()'\n"
        "p = subprocess.Popen([sys.executable, '-c', child], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print('up', flush=True); signal.pause()\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
    ours, stranger = processes
    UiServer(ours, "", tmp_path / "log").close()
    assert members(ours.pid) == []
    assert len(members(stranger.pid)) == 2
    os.killpg(stranger.pid, 9)
    stranger.wait()
