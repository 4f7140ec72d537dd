"""The engine with the decoder program on a tiny Llama: the same promises as with the toy, on what is really served."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bench_leaks import slope, use_of
from engines.decoder_engine import DecoderEngine
from engines.judge.baselines import BASELINE_NAMES
from engines.program import ReplayRequest
from hotpass.records.candidate import Candidate, Numerics, PartSource, PartUse
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind, Side, Tier
from tests.engines.conftest import ROWS, assignment

PART = """
import os, time, ctypes
from hotpass import part

@part(engine="decoder", claims=["model"])
class Whole:
    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, batch, kv):
        {body}
"""


DERIVES = """
from hotpass import part

@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", reload="reweight")
class Derives:
    def weights(self, w, params):
        return {{"gate": w["gate_proj.weight"] + {shift}}}

    def prepare(self, ctx, params):
        self.reference, self.gate = ctx.reference(), ctx.weights["gate"]

    def forward(self, x):
        return self.reference(x)
"""


def whole(body: str) -> Candidate:
    """A part that claims `model`, with this forward."""
    source = PartSource(name="planted", files=(("part.py", PART.format(body=body)),))
    return Candidate(parts=(PartUse(source=source),), numerics=Numerics.TOLERANCE)


HONEST = whole("return self.reference(batch, kv)")


def requests(count: int, seed: int, held_out: bool) -> list[ReplayRequest]:
    return [ReplayRequest(request_id=i, tokens=tuple(range(1, 6 + i)), output_tokens=2 + i % 2) for i in range(count)]


@pytest.fixture(scope="module")
def engine(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecoderEngine]:
    cache: Path = tmp_path_factory.mktemp("builds")
    with DecoderEngine(
        "tiny",
        threads=1,
        window_ms=1.0,
        aa_seconds=0.1,
        serving_context=64,
        requests=requests,
        cache_dir=str(cache),
    ) as engine:
        engine.load(deployment, Tier.FAST)
        yield engine


def test_an_honest_part_passes_and_the_child_stays(engine: DecoderEngine, deployment: Deployment) -> None:
    child = engine._loaded.pair().child.pid
    for _ in range(3):
        result = engine.measure(assignment(deployment, HONEST))
        assert result.failure is None
        assert result.clean is not None
        assert result.clean.clean, result.clean.reasons
        assert {check.against for check in result.checks} == {"reference", "incumbent", "kv"}
        assert all(check.bit_equal for check in result.checks if check.against != "kv")
        assert all(check.max_abs < 1e-4 for check in result.checks)
        assert result.activation["model"] > 0
    assert engine._loaded.pair().child.pid == child


def test_a_wrong_part_shows_in_the_checks(engine: DecoderEngine, deployment: Deployment) -> None:
    result = engine.measure(assignment(deployment, whole("return self.reference(batch, kv) * 1.001")))
    assert result.failure is None
    assert all(0 < check.max_abs < 0.1 for check in result.checks)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("ctypes.string_at(0)", FailureKind.CRASH),
        ("raise ValueError('planted')", FailureKind.EXCEPTION),
        ("return self.reference(batch, kv)[:, :3]", FailureKind.PROTOCOL),
    ],
)
def test_faults_are_records(body: str, kind: FailureKind, engine: DecoderEngine, deployment: Deployment) -> None:
    result = engine.measure(assignment(deployment, whole(body)))
    assert result.failure is not None
    assert result.failure.kind is kind
    assert engine.measure(assignment(deployment, HONEST)).failure is None


def test_a_candidate_that_garbles_the_incumbents_cache_is_not_clean(
    engine: DecoderEngine, deployment: Deployment
) -> None:
    body = (
        "import gc\n        pools = [o for o in gc.get_objects() if type(o).__name__ == 'KvPool' and o is not kv]"
        "\n        [pool.keys(0).fill_(1.0) for pool in pools]\n        return self.reference(batch, kv)"
    )
    result = engine.measure(assignment(deployment, whole(body)))
    assert result.clean is not None
    assert any("the incumbent's answers changed" in reason for reason in result.clean.reasons)
    assert engine.measure(assignment(deployment, HONEST)).failure is None


def test_warm_and_cold_give_the_same_text(engine: DecoderEngine) -> None:
    prompts = [[1, 2, 3, 4], [9, 8, 7]]
    before = engine.generate(Side.INCUMBENT, prompts, 5)
    engine.install(Side.CANDIDATE, HONEST)
    assert engine.generate(Side.CANDIDATE, prompts, 5) == before
    engine.restore()
    assert engine.generate(Side.CANDIDATE, prompts, 5) == before


def test_reloads_leave_descriptors_and_mappings_flat(engine: DecoderEngine, deployment: Deployment) -> None:
    child = engine._loaded.pair().child

    def held() -> tuple[int, int, int, int]:
        with open(f"/proc/{child.pid}/maps") as maps:
            shared = sum("memfd" in line for line in maps)
        fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (child.pid, os.getpid())]
        return (*fds, shared, child.num_threads())

    counts = []
    for shift in range(8):
        source = PartSource(name="derives", files=(("part.py", DERIVES.format(shift=shift % 4)),))
        engine.install(Side.CANDIDATE, Candidate(parts=(PartUse(source=source),), numerics=Numerics.TOLERANCE))
        engine.restore()
        counts.append(held())
    assert counts[-1] == counts[3], counts
    assert engine._loaded.pair().child is child


def test_the_slow_tier_serves_real_requests(engine: DecoderEngine, deployment: Deployment) -> None:
    result = engine.measure(assignment(deployment, HONEST, tier=Tier.SLOW, replay_requests=4))
    assert result.failure is None
    assert all(replay.candidate[0].output_tokens == 2 + 3 + 2 + 3 for replay in result.replays)


def test_transformers_own_loop_is_a_baseline(engine: DecoderEngine) -> None:
    measured = engine.measure_baseline("transformers-eager-fp32", ROWS, 1, 30.0)
    assert measured.failure is None
    assert measured.numerics is Numerics.TOLERANCE
    assert all(check.max_abs < 1e-3 for check in measured.checks)


def test_the_names_of_baselines_are_the_programs() -> None:
    from engines.decoder.baseline import BASELINES

    assert sorted(BASELINE_NAMES) == sorted(BASELINES)


def test_the_reference_agrees_with_itself_and_the_weights_hold(engine: DecoderEngine) -> None:
    noise = engine.reference_noise()
    assert [check.row for check in noise] == list(ROWS)
    assert all(check.max_abs < 1e-4 for check in noise)
    score = engine.score(HONEST, 2, 20, 5, 1e-4)
    assert (score.positions, score.agree) == (40, 40)
    assert engine.verify_weights()


def test_a_hundred_reloads_leave_memory_descriptors_and_threads_as_they_were(engine: DecoderEngine) -> None:
    """Of twenty candidates; `make bench-leaks` does a thousand on a real model."""
    numbered = [whole(f"return self.reference(batch, kv)  # {number}") for number in range(18)]
    candidates = [*numbered, Candidate(settings={"threads": 2}), Candidate(settings={"kv_dtype": "bfloat16"})]
    child = engine._loaded.pair().child.pid
    taken = []
    for number in range(100):
        engine.install(Side.CANDIDATE, candidates[number % 20])
        engine.generate(Side.CANDIDATE, [[1, 2, 3]], 2)
        engine.restore()
        taken.append(use_of(child))
    settled = taken[40:]
    assert engine._loaded.pair().child.pid == child
    assert len({(use.descriptors, use.threads) for use in settled}) == 1
    assert slope([use.own_mb for use in settled]) < 0.05
