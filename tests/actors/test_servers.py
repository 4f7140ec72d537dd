"""The plain servers that are wrapped as actors, without Ray: engine, builder, requests to replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.builder import BuilderServer
from actors.engine import EngineServer
from actors.requests import replay_maker, sample
from actors.spec import EngineSpec, make_engine, simulated_step_ms
from engines.fake import FakeEngine
from hotpass.errors import EngineDied, InputError
from hotpass.records.candidate import AS_LOADED, Candidate, PartUse
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, MeasureResult, Purpose, Tier
from hotpass.traffic import read_traffic
from tests.cluster.campaigns import SHAPES, make_plan, part

SPEC = EngineSpec(kind="fake", name="fake-0")


def order(candidate: Candidate = AS_LOADED) -> Assignment:
    return Assignment(
        incumbent=AS_LOADED, candidate=candidate, tier=Tier.FAST, purpose=Purpose.SEARCH, rows=SHAPES.rows, seed=1, deadline_seconds=5.0
    )  # fmt: skip


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return make_plan(tmp_path / "c").deployment


class DiesOnce(FakeEngine):
    """Dies at its first measurement, as an engine whose zygote was killed."""

    deaths = 0

    def measure(self, assignment: Assignment) -> MeasureResult:
        if not type(self).deaths:
            type(self).deaths = 1
            raise EngineDied("the zygote is gone")
        return super().measure(assignment)


def test_an_engine_that_died_is_made_and_loaded_again(deployment: Deployment) -> None:
    made: list[FakeEngine] = []

    def make(spec: EngineSpec, deployment: Deployment) -> FakeEngine:
        made.append(DiesOnce(spec.name))
        return made[-1]

    server = EngineServer(SPEC, make)
    server.load(deployment, Tier.FAST)
    assert server.measure(order()).result.failure is None
    assert len(made) == 2


def test_a_server_without_a_load_says_so() -> None:
    with pytest.raises(EngineDied, match="fake-0 is not loaded"):
        EngineServer(SPEC).measure(order())


def test_evidence_of_a_candidate_that_cannot_be_scored_names_the_problem(deployment: Deployment) -> None:
    server = EngineServer(SPEC)
    server.load(deployment, Tier.FAST)
    crashing = Candidate(parts=(PartUse(source=part("crash-mlp", "mlp")),))
    found = server.evidence(crashing, seed=1, noise_abs=1e-5)
    assert (found.agreement, found.weights_unchanged, found.problem) == (None, True, "SIGSEGV")
    whole = server.evidence(AS_LOADED, seed=1, noise_abs=1e-5)
    assert whole.agreement is not None
    assert whole.agreement.clear_agree == whole.agreement.clear > 0


def test_an_unknown_engine_is_refused(deployment: Deployment) -> None:
    with pytest.raises(InputError, match="engine 'abacus' is not known"):
        make_engine(EngineSpec(kind="abacus", name="x"), deployment)


def test_the_fake_builder_has_nothing_to_build(deployment: Deployment) -> None:
    builder = BuilderServer(SPEC, deployment, 10.0)
    assert builder.build(Candidate(parts=(PartUse(source=part("a", "mlp")),))).failure is None
    assert builder.has_compiler()


def test_simulated_times_depend_on_names_and_nothing_else() -> None:
    row = SHAPES.rows[0]
    one = Candidate(parts=(PartUse(source=part("a", "mlp")),))
    assert simulated_step_ms(one, row) == simulated_step_ms(one, row) != simulated_step_ms(AS_LOADED, row)


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_replayed_requests_are_of_the_traffic_and_repeat_with_their_seed() -> None:
    traffic = sample(read_traffic("chat"), 64, max_output_tokens=64, max_context=2048)
    assert 16 <= len(traffic.requests) <= 64
    assert all(request.output_tokens <= 64 and request.context <= 2048 for request in traffic.requests)
    make = replay_maker(traffic, encode)
    first, again, other = make(3, 1, False), make(3, 1, False), make(3, 2, False)
    assert first == again
    assert [r.tokens for r in first] != [r.tokens for r in other]
    lengths = {(request.input_tokens, request.output_tokens) for request in traffic.requests}
    assert all((len(r.tokens), r.output_tokens) in lengths for r in first)
    assert [r.tokens for r in make(3, 1, True)] != [r.tokens for r in first]


def test_a_limit_that_leaves_too_little_traffic_is_raised() -> None:
    traffic = sample(read_traffic("chat"), 64, max_output_tokens=1, max_context=2048)
    assert len(traffic.requests) >= 16
