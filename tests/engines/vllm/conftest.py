"""One live vLLM engine for all tests of this folder, on a tiny model whose heads are as wide as vLLM's CPU kernels want them.

The tests are skipped where no venv with vLLM is; with HOTPASS_VLLM=1 the venv is made first (minutes, about 3 GB).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines.prepare.model import prepare_model
from engines.prepare.tiny import make_tiny_model
from engines.program import ReplayRequest
from engines.vllm.environment import ROOT, find_python
from engines.vllm_engine import VllmEngine
from hotpass.errors import InputError
from hotpass.records.deployment import Deployment, ModelRef
from hotpass.records.measurement import Tier


@pytest.fixture(scope="session")
def python() -> str:
    """Of the venv with vLLM."""
    if os.environ.get("HOTPASS_VLLM") == "1":
        made = subprocess.run(["sh", "scripts/install-vllm.sh"], cwd=ROOT, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"vLLM cannot be installed here: {made.stderr.strip()[-300:]}")
    try:
        return find_python()
    except InputError as error:
        pytest.skip(f"{error} (HOTPASS_VLLM=1 makes it)")


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    """Four layers, heads of 32."""
    folder = tmp_path_factory.mktemp("wide")
    made = make_tiny_model(folder / "model", layers=4, hidden=128, heads=4, kv_heads=2)
    return prepare_model(str(made), cache_dir=folder / "cache")


@pytest.fixture(scope="session")
def deployment(deployment: Deployment, wide_model: ModelRef) -> Deployment:
    """The deployment of the other engines' tests with that model."""
    return replace(deployment, model=wide_model)


@pytest.fixture(scope="session")
def live(python: str, deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with _engine(python, tmp_path_factory.mktemp("vllm"), enforce_eager=True) as engine:
        engine.load(deployment, Tier.FAST)
        yield engine


@pytest.fixture(scope="session")
def compiled(python: str, deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """The same with vLLM's own compile mode."""
    with _engine(python, tmp_path_factory.mktemp("vllm-compiled"), enforce_eager=False) as engine:
        engine.load(deployment, Tier.FAST)
        yield engine


def _engine(python: str, folder: Path, *, enforce_eager: bool) -> VllmEngine:
    return VllmEngine(
        "tiny-vllm",
        python=python,
        arguments={"enforce_eager": enforce_eager},
        threads=1,
        window_ms=2.0,
        aa_seconds=0.2,
        serving_context=64,
        requests=_requests,
        cache_dir=str(folder),
        audited_share=0.0,
    )


def _requests(count: int, seed: int, held_out: bool) -> list[ReplayRequest]:
    return [ReplayRequest(request_id=i, tokens=tuple(range(1, 6 + i)), output_tokens=2 + i % 2) for i in range(count)]
