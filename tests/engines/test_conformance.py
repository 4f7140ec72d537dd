"""The shipped suite over the fake and over the decoder on a tiny model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engines.decoder_engine import DecoderEngine
from engines.fake import FakeEngine
from engines.program import ReplayRequest
from engines.testing import STALE, EngineSuite, Faults, order
from hotpass.records.candidate import Candidate, Numerics, PartSource, PartUse
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, FailureKind, Tier

PART = """
import ctypes

from hotpass import part


@part(engine="decoder", claims=["model"])
class Planted:
    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, batch, kv):
        {body}
        return self.reference(batch, kv)
"""


def planted(name: str, body: str = "pass") -> Candidate:
    source = PartSource(name=name, files=(("part.py", PART.format(body=body)),))
    return Candidate(parts=(PartUse(source=source),), numerics=Numerics.TOLERANCE)


@pytest.fixture(scope="class")
def honest() -> Candidate:
    return planted("honest")


@pytest.fixture(scope="class")
def faults() -> Faults:
    """Named so that the fake fails alike."""
    return {
        FailureKind.CRASH: planted("crash", "ctypes.string_at(0)"),
        FailureKind.EXCEPTION: planted("raise", "raise RuntimeError('planted')"),
        FailureKind.TIMEOUT: planted("hang", "while True: pass"),
    }


class TestFake(EngineSuite):
    @pytest.fixture(scope="class")
    def stale(self) -> Mapping[str, Candidate]:
        return {}

    @pytest.fixture(scope="class")
    def engine(self, deployment: Deployment) -> FakeEngine:
        engine = FakeEngine()
        engine.load(deployment, Tier.FAST)
        return engine


def test_the_fake_keeps_nothing_of_what_it_measured(deployment: Deployment) -> None:
    """A bench gives it tens of thousands of assignments."""
    engine = FakeEngine()
    engine.load(deployment, Tier.FAST)
    before = _assignments()
    for _ in range(3):
        engine.measure(order(deployment, planted("honest")))
    assert _assignments() == before


def _assignments() -> int:
    gc.collect()
    return sum(type(item) is Assignment for item in gc.get_objects())


class TestDecoder(EngineSuite):
    @pytest.fixture(scope="class")
    def stale(self) -> Mapping[str, Candidate]:
        return {what: planted(what, line) for what, line in STALE.items()}

    @pytest.fixture(scope="class")
    def engine(self, deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecoderEngine]:
        folder: Path = tmp_path_factory.mktemp("conformance")
        with DecoderEngine(
            "tiny",
            threads=1,
            window_ms=2.0,
            aa_seconds=0.2,
            serving_context=64,
            requests=_requests,
            cache_dir=str(folder),
        ) as engine:
            engine.load(deployment, Tier.FAST)
            yield engine


def _requests(count: int, seed: int, held_out: bool) -> list[ReplayRequest]:
    return [ReplayRequest(request_id=i, tokens=tuple(range(1, 6 + i)), output_tokens=2 + i % 2) for i in range(count)]
