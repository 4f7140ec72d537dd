"""A real model behind a real server: SmolLM2-135M on vLLM on the CPU. It cannot write a part; its replies must do no harm."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.campaign import run_campaign
from cluster.journal import read_state
from hotpass.errors import HotpassError, InputError
from tests.cluster.campaigns import make_running

pytestmark = pytest.mark.slow
MAX_TOKENS = 6_150
"""The rules and what the campaign knows take all but some two hundred of it: a reply short enough to wait for."""
START_SECONDS = 280.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """URL of the server, which ends with the test."""
    from engines.prepare import prepare_model
    from engines.vllm.environment import find_python
    from engines.vllm.folder import model_folder

    try:
        python = find_python()
    except InputError as error:
        pytest.skip(f"{error} (`make vllm` makes it)")
    try:
        folder = model_folder(prepare_model("smollm2-135m"), str(tmp_path))
    except HotpassError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The CPU build is distributed under another name than `vllm`, which the `vllm` command does not find.
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "smollm2",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "2",
        "--enforce-eager",
    ]  # fmt: skip
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
    } | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "2"}
    log = (tmp_path / "vllm.log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", tmp_path / "vllm.log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        if server.poll() is not None:
            pytest.skip(f"vLLM does not start here: {log.read_text()[-300:]}")
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)  # another process: there is no event to wait for
    pytest.skip(f"vLLM was not up after {START_SECONDS:.0f} s")


@pytest.mark.timeout(600)
def test_a_model_that_understands_nothing_does_no_harm(served: str, tmp_path: Path) -> None:
    running = make_running(
        tmp_path / "c", agents=1, llm="openai/smollm2", llm_api_base=served, llm_context=8192, llm_max_tokens=MAX_TOKENS,
        llm_turn="2m", sampler="none", baselines=False,
    )  # fmt: skip
    result = run_campaign(running)
    state = read_state(tmp_path / "c")
    spend = state.llm_spend["agent:mlp"]
    assert spend.calls > 0
    assert 0 < spend.tokens <= MAX_TOKENS
    assert result["verdict"] != "faster"
    assert state.winner is None
    for info in state.candidates.values():  # should it ever have proposed something, the judge has had it
        assert state.attempts_of(info.candidate_id)
