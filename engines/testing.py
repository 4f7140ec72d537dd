"""The conformance suite: what every engine must do, whatever it runs. The fake, the decoder and others run through it.

    class TestMine(EngineSuite): fixtures `engine` (loaded, shared), `deployment`, `honest`, `faults`, `stale`

Methods are tests for pytest, which this module does not import. What an engine measures is not asserted, only that it is whole:
everything asked for is there, what a candidate does wrong is a record, and the next candidate finds the engine as the last one did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engines.program import CandidateFailed
from engines.protocol import Engine, MeasuresBaselines, Profiles
from hotpass.canonical import to_plain
from hotpass.decode import from_plain, json_safe
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, FailureKind, MeasureResult, Purpose, Side, Stopping, Tier
from hotpass.records.profile import Profile

PROMPTS = ((1, 2, 3, 4), (9, 8, 7))
QUICK = Stopping(min_rounds=3, max_rounds=4)

Faults = Mapping[FailureKind, Candidate]
"""How a candidate fails → one that does."""

_OTHER_WEIGHTS = """
import sys
frame = sys._getframe()
while frame is not None:
    if type(frame.f_locals.get("self")).__name__.endswith("Program"):
        frame.f_locals["self"]._epoch = "stale"
    frame = frame.f_back
"""
STALE = {
    "weights": f"exec({_OTHER_WEIGHTS!r})",
    "candidate": "[setattr(item, 'candidate', type(item.candidate)()) for item in __import__('gc').get_objects() "
    "if type(item).__name__ == 'Installed']",
}
"""What goes stale → a line of a part that makes the program's own book so: other weights than were loaded, or as loaded where the part
is. Stands for a reload that did not happen."""


def order(deployment: Deployment, candidate: Candidate, tier: Tier = Tier.FAST) -> Assignment:
    """A short assignment over every row, as loaded being the incumbent."""
    return Assignment(
        incumbent=AS_LOADED,
        candidate=candidate,
        tier=tier,
        purpose=Purpose.SEARCH,
        rows=deployment.shapes.rows,
        seed=3,
        deadline_seconds=20.0,
        stopping=QUICK,
        replay_requests=4,
    )


def assert_whole(result: MeasureResult, deployment: Deployment, engine: Engine) -> None:
    """A result of a candidate that did nothing wrong."""
    assert result.failure is None, result.failure
    assert result.engine == engine.name
    assert result.epoch
    assert result.clean is not None
    assert result.clean.clean, result.clean.reasons
    assert result.weights_unchanged
    assert {report.candidate_id for report in result.reloads} >= {result.assignment.candidate.id}
    checked = {check.row for check in result.checks if check.against == "reference"}
    assert checked == set(deployment.shapes.rows)
    assert all(check.positions > 0 for check in result.checks)
    assert result.phases_ms


def score_failure(engine: MeasuresBaselines, candidate: Candidate) -> FailureKind | None:
    """How scoring a candidate failed; None when it did not."""
    try:
        engine.score(candidate, 1, 4, 5, 1e-3)
    except CandidateFailed as error:
        return error.failure.kind
    return None


class EngineSuite:
    """Subclass it and give the fixtures. `faults` may leave kinds out that an engine cannot have."""

    def test_slots_are_named_once_and_the_whole_model_is_one(self, engine: Engine) -> None:
        table = engine.slots()
        assert "model" in table.names()
        assert len(set(table.names())) == len(table.names())
        assert table.version
        assert all(slot.signature and slot.reference_sha256 for slot in table.slots)

    def test_an_honest_candidate_gives_a_whole_result(
        self, engine: Engine, deployment: Deployment, honest: Candidate
    ) -> None:
        assignment = order(deployment, honest)
        result = engine.measure(assignment)
        assert_whole(result, deployment, engine)
        assert result.assignment == assignment
        rounds = {block.round_index for block in result.blocks}
        assert len(rounds) >= QUICK.min_rounds
        for block in result.blocks:
            assert block.row in deployment.shapes.rows
            assert min(*block.incumbent_ms, *block.candidate_ms) > 0
            assert block.order in ("ABBA", "BAAB", "AB", "BA")
        for index in rounds:
            assert {block.row for block in result.blocks if block.round_index == index} == set(deployment.shapes.rows)

    def test_every_claimed_slot_is_proven_to_have_run(
        self, engine: Engine, deployment: Deployment, honest: Candidate
    ) -> None:
        result = engine.measure(order(deployment, honest))
        assert result.activation
        assert set(result.activation) <= set(engine.slots().names())
        assert all(calls > 0 for calls in result.activation.values()), result.activation

    def test_as_loaded_can_be_measured_against_itself(self, engine: Engine, deployment: Deployment) -> None:
        result = engine.measure(replace(order(deployment, AS_LOADED), purpose=Purpose.AA))
        assert_whole(result, deployment, engine)
        assert not any(result.activation.values())

    def test_results_carry_one_epoch_and_environment(
        self, engine: Engine, deployment: Deployment, honest: Candidate
    ) -> None:
        first, second = (engine.measure(order(deployment, part)) for part in (honest, AS_LOADED))
        assert first.epoch == second.epoch
        assert first.environment.fingerprint == second.environment.fingerprint

    def test_a_result_survives_its_own_writing(self, engine: Engine, deployment: Deployment, honest: Candidate) -> None:
        result = engine.measure(order(deployment, honest))
        assert from_plain(MeasureResult, json_safe(to_plain(result))) == result

    def test_a_replay_serves_whole_requests_on_both_sides(
        self, engine: Engine, deployment: Deployment, honest: Candidate
    ) -> None:
        result = engine.measure(order(deployment, honest, Tier.SLOW))
        assert_whole(result, deployment, engine)
        assert len(result.replays) >= QUICK.min_rounds
        for replay in result.replays:
            runs = (*replay.incumbent, *replay.candidate)
            assert len({(run.num_requests, run.output_tokens) for run in runs}) == 1
            assert all(run.wall_seconds > 0 and len(run.ttft_ms) == run.num_requests for run in runs)

    def test_installing_and_restoring_give_back_what_was_there(self, engine: Engine, honest: Candidate) -> None:
        """A→B→A."""
        engine.restore()
        before = engine.generate(Side.CANDIDATE, PROMPTS, 4)
        report = engine.install(Side.CANDIDATE, honest)
        assert (report.candidate_id, report.side) == (honest.id, Side.CANDIDATE)
        assert report.phases_ms
        engine.generate(Side.CANDIDATE, PROMPTS, 4)
        assert engine.generate(Side.INCUMBENT, PROMPTS, 4) == before
        engine.restore()
        assert engine.generate(Side.CANDIDATE, PROMPTS, 4) == before
        assert [len(text) for text in before] == [4, 4]

    def test_faults_are_records_and_the_next_candidate_is_served(
        self, engine: Engine, deployment: Deployment, honest: Candidate, faults: Faults
    ) -> None:
        epoch = engine.measure(order(deployment, honest)).epoch
        for kind, faulty in faults.items():
            seconds = 2.0 if kind is FailureKind.TIMEOUT else 20.0
            result = engine.measure(replace(order(deployment, faulty), deadline_seconds=seconds))
            assert result.failure is not None, kind
            assert result.failure.kind is kind, result.failure
            assert result.failure.message
            after = engine.measure(order(deployment, honest))
            assert_whole(after, deployment, engine)
            assert after.epoch == epoch

    def test_an_answer_on_other_weights_or_of_another_candidate_is_rejected(
        self, engine: Engine, deployment: Deployment, honest: Candidate, stale: Mapping[str, Candidate]
    ) -> None:
        """`stale`: parts with the lines of `STALE`; empty for an engine whose answers cross no process."""
        for what, problem in (("weights", "the weights' epoch is"), ("candidate", "answered on the side of")):
            if what in stale:
                result = engine.measure(order(deployment, stale[what]))
                assert result.failure is not None, what
                assert result.failure.kind is FailureKind.PROTOCOL, result.failure
                assert problem in result.failure.message
                assert not result.blocks
        assert_whole(engine.measure(order(deployment, honest)), deployment, engine)

    def test_a_profile_shows_where_the_time_goes(
        self, engine: Engine, deployment: Deployment, honest: Candidate, faults: Faults
    ) -> None:
        if not isinstance(engine, Profiles):
            return
        found = engine.profile(order(deployment, honest))
        assert found.failure is None
        assert (found.candidate_id, [row.row for row in found.rows]) == (honest.id, list(deployment.shapes.rows))
        assert found.nsight
        for row in found.rows:
            assert row.operators
            assert row.step_ms > 0
            assert sum(operator.share for operator in row.operators) <= 1.01
            assert 0 <= row.gaps_ms <= row.profiled_ms
            assert {slot.slot for slot in row.slots} <= set(engine.slots().names())
            assert row.whole is not None
            assert all(slot.ms >= slot.self_ms >= 0 and slot.bytes_moved > 0 for slot in row.slots)
        assert from_plain(Profile, json_safe(to_plain(found))) == found
        for kind in faults.keys() & {FailureKind.CRASH, FailureKind.EXCEPTION}:
            broken = engine.profile(order(deployment, faults[kind])).failure
            assert broken is not None, kind
            assert broken.kind is kind
        assert_whole(engine.measure(order(deployment, honest)), deployment, engine)

    def test_the_weights_hold(self, engine: Engine) -> None:
        if isinstance(engine, MeasuresBaselines):
            assert engine.verify_weights()

    def test_baselines_and_scores(self, engine: Engine, deployment: Deployment, honest: Candidate) -> None:
        if not isinstance(engine, MeasuresBaselines):
            return
        assert [check.row for check in engine.reference_noise()] == list(deployment.shapes.rows)
        for name in engine.baselines()[:1]:  # an engine may have none
            measured = engine.measure_baseline(name, deployment.shapes.rows, 1, 30.0)
            assert (measured.name, measured.failure) == (name, None)
            assert measured.blocks
        score = engine.score(honest, 2, 12, 5, 1e-3)
        assert (score.texts, score.positions, score.clear_agree) == (2, 24, score.clear)

    def test_a_score_of_a_crash_raises_and_costs_nothing_else(
        self, engine: Engine, deployment: Deployment, honest: Candidate, faults: Faults
    ) -> None:
        if not isinstance(engine, MeasuresBaselines) or FailureKind.CRASH not in faults:
            return
        assert score_failure(engine, faults[FailureKind.CRASH]) is FailureKind.CRASH
        assert_whole(engine.measure(order(deployment, honest)), deployment, engine)
