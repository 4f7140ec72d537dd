"""The engine as its callers see it, on the toy program: honest pairs, both tiers, every pairing, and nothing left behind."""

from __future__ import annotations

import math
import re
import statistics
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from engines.decoder_engine import DecoderEngine
from engines.judge.inputs import RandomTokens, TokenSource
from engines.judge.install import PartFiles
from engines.judge.pairing import pairing_within
from hotpass.canonical import canonical_json
from hotpass.decode import json_safe
from hotpass.errors import EngineDied, InputError, MachineError
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind, Pairing, Purpose, Side, Stopping, Tier
from hotpass.stats import SequentialTest, rounds_of, weighted_round
from tests.engines.conftest import ROWS, assignment, candidate, open_files, toy_engine

HONEST = candidate("return reference(tokens, summaries)")
SLEEPS = candidate("time.sleep(0.04)\nreturn reference(tokens, summaries)")
OFF = candidate("return reference(tokens, summaries) + 0.5")


def descendants() -> set[psutil.Process]:
    """Processes below this one, those of other tests' engines too."""
    return set(psutil.Process().children(recursive=True))


def test_an_honest_copy_is_measured_checked_and_left_clean(toy: DecoderEngine, deployment: Deployment) -> None:
    result = toy.measure(assignment(deployment, HONEST, purpose=Purpose.REMEASURE))
    assert result.failure is None
    assert result.clean is not None
    assert result.clean.clean, result.clean.reasons
    assert len(result.blocks) in (6, 8)
    assert {block.row for block in result.blocks} == set(ROWS)
    assert {block.layers for block in result.blocks} == {4}
    assert {check.against for check in result.checks} == {"reference", "incumbent"}
    assert all(check.bit_equal and check.max_abs == 0.0 for check in result.checks)
    windows = sum(2 * block.steps_per_window for block in result.blocks)
    assert result.activation == {"model": windows}
    assert result.weights_unchanged
    assert result.simulated is False
    assert 0.0 < min(block.child_clock_ratio for block in result.blocks) <= 1.02


def test_every_candidate_window_is_compared_with_the_incumbent(toy: DecoderEngine, deployment: Deployment) -> None:
    result = toy.measure(assignment(deployment, HONEST, purpose=Purpose.REMEASURE))
    for row in ROWS:
        blocks = [block for block in result.blocks if block.row == row]
        (check,) = [c for c in result.checks if c.against == "incumbent" and c.row == row]
        assert check.positions == sum(2 * block.steps_per_window * row.num_seqs for block in blocks)


def test_the_windows_of_a_search_are_half_as_many_for_a_slow_candidate(
    toy: DecoderEngine, deployment: Deployment
) -> None:
    """On a machine so busy that three rounds do not tell, the other half is looked at, and not timed."""
    stopping = Stopping(min_rounds=3, max_rounds=3)
    result = toy.measure(assignment(deployment, SLEEPS, stopping=stopping))
    assert {len(block.order) for block in result.blocks} == {2}
    test = SequentialTest(stopping)
    for group in rounds_of(result.blocks):
        test.add(weighted_round(group))
    looks = 1 if test.decision() == "slower" else 2
    assert result.activation == {"model": looks * sum(block.steps_per_window for block in result.blocks)}
    for row in ROWS:
        blocks = [block for block in result.blocks if block.row == row]
        (check,) = [c for c in result.checks if c.against == "incumbent" and c.row == row]
        assert check.positions == looks * sum(block.steps_per_window * row.num_seqs for block in blocks)


def test_a_candidate_far_behind_is_given_up_before_the_late_rows(toy: DecoderEngine, deployment: Deployment) -> None:
    assert toy._stable.late_rows == {1}, "prompts"
    given_up = Stopping(min_rounds=3, max_rounds=3, hopeless=0.5, far_behind=0.5)
    result = toy.measure(assignment(deployment, SLEEPS, stopping=given_up))
    assert result.failure is None
    assert {block.row for block in result.blocks} == {ROWS[0]}
    assert len(result.at_most) == 1
    assert 0 < result.at_most[0] < 0.5
    assert {check.row for check in result.checks} == {ROWS[0]}
    # a hiccup of the machine in the candidate's one short window may give up an honest one, too
    honest = (toy.measure(assignment(deployment, HONEST, stopping=given_up, seed=seed)) for seed in range(8))
    assert any(one.at_most == () and {block.row for block in one.blocks} == set(ROWS) for one in honest)
    whole = toy.measure(assignment(deployment, SLEEPS, stopping=replace(given_up, far_behind=None)))
    assert {block.row for block in whole.blocks} == set(ROWS), "only where it was asked for"


def test_the_reference_checks_use_each_pool_set_once(toy: DecoderEngine, deployment: Deployment) -> None:
    result = toy.measure(assignment(deployment, HONEST, stopping=Stopping(min_rounds=4, max_rounds=4, half_width=1e-9)))
    steps = {block.row.key: block.steps_per_window for block in result.blocks}
    found = {check.row.key: check.positions for check in result.checks if check.against == "reference"}
    assert found == {ROWS[0].key: 4 * steps[ROWS[0].key] * 2, ROWS[1].key: 2 * steps[ROWS[1].key]}


def test_a_against_a_is_many_rounds_of_a_window_a_side_and_no_more(toy: DecoderEngine, deployment: Deployment) -> None:
    five = Stopping(min_rounds=5, max_rounds=5)
    result = toy.measure(assignment(deployment, Candidate(), purpose=Purpose.AA, stopping=five))
    assert result.failure is None
    assert [len(block.order) for block in result.blocks] == [2] * 5 * len(ROWS)
    timed = {
        row.key: 5 * block.steps_per_window * row.num_seqs
        for row in ROWS
        for block in result.blocks
        if block.row == row
    }
    looked_at = {check.row.key: check.positions for check in result.checks if check.against == "incumbent"}
    assert looked_at == timed


def test_a_slower_candidate_is_slower(toy: DecoderEngine, deployment: Deployment) -> None:
    result = toy.measure(assignment(deployment, SLEEPS))
    assert result.failure is None
    assert statistics.median(block.log_ratio for block in result.blocks) < -0.3


def test_wrong_outputs_are_numbers_not_a_failure(toy: DecoderEngine, deployment: Deployment) -> None:
    result = toy.measure(assignment(deployment, OFF))
    assert result.failure is None
    assert all(0.49 < check.max_abs < 0.51 for check in result.checks)
    assert not any(check.bit_equal for check in result.checks)


def test_an_answer_that_was_not_written_is_infinitely_wrong(toy: DecoderEngine, deployment: Deployment) -> None:
    nan = candidate("return reference(tokens, summaries) * float('nan')")
    result = toy.measure(assignment(deployment, nan))
    assert all(check.max_abs == math.inf for check in result.checks)


def test_another_incumbent_is_installed_and_as_loaded_compared(toy: DecoderEngine, deployment: Deployment) -> None:
    result = toy.measure(assignment(deployment, HONEST, incumbent=OFF))
    assert result.failure is None
    found = {check.against: check for check in result.checks if check.row == ROWS[0]}
    assert found["loaded"].bit_equal
    assert found["reference"].bit_equal
    assert found["incumbent"].max_abs == pytest.approx(0.5, abs=0.01)
    assert {report.side for report in result.reloads} == {Side.INCUMBENT, Side.CANDIDATE}


def test_an_incumbent_whose_answers_change_is_noticed(toy: DecoderEngine, deployment: Deployment) -> None:
    body = "program.summaries['incumbent', 0, 0] = [1.0, 1.0]\nreturn reference(tokens, summaries)"
    result = toy.measure(assignment(deployment, candidate(body)))
    assert result.clean is not None
    assert f"the incumbent's answers changed on {ROWS[0].key}" in result.clean.reasons
    assert result.clean.child_replaced


@pytest.mark.parametrize("pairing", [Pairing.TWO_ENGINES, Pairing.ALTERNATING])
def test_other_pairings(pairing: Pairing, toy: DecoderEngine, deployment: Deployment) -> None:
    before = toy._loaded.pair().child.pid
    result = toy.measure(assignment(deployment, SLEEPS, pairing=pairing, purpose=Purpose.COLD))
    assert result.failure is None
    assert result.pairing is pairing
    assert statistics.median(block.log_ratio for block in result.blocks) < -0.3
    assert all(check.bit_equal for check in result.checks)
    assert {report.side for report in result.reloads} == set(Side)
    assert toy._loaded.pair().child.pid == before
    assert result.noise_floor > 0
    if pairing is Pairing.TWO_ENGINES:
        assert result.incumbent_disturbed != 1.0
        assert result.disturbed_low is not None


MARKS = candidate("return reference(tokens, summaries)", setup="torch.marked = True")
TELLS = candidate(
    "beside = any(side == 'incumbent' for side, _ in program.installed)\n"
    "return reference(tokens, summaries) + 0.25 * beside + 0.5 * hasattr(torch, 'marked')"
)
"""Its answers are off by a quarter while an incumbent is installed in its process, and by a half after one has been."""


@pytest.mark.parametrize(
    ("pairing", "off"), [(Pairing.SIDE_BY_SIDE, 0.75), (Pairing.ALTERNATING, 0.5), (Pairing.TWO_ENGINES, 0.0)]
)
@pytest.mark.parametrize("tier", list(Tier))
def test_sides_live_as_the_pairing_says(
    tier: Tier, pairing: Pairing, off: float, toy: DecoderEngine, deployment: Deployment
) -> None:
    toy._loaded.discard_pair()
    order = assignment(deployment, TELLS, incumbent=MARKS, pairing=pairing, tier=tier, replay_requests=3)
    result = toy.measure(order)
    toy._loaded.discard_pair()  # marked
    assert result.failure is None
    assert result.pairing is pairing
    assert (len(result.blocks) > 0, len(result.replays) > 0) == (tier is Tier.FAST, tier is Tier.SLOW)
    found = max(check.max_abs for check in result.checks if check.against == "reference")
    if (tier, pairing) == (Tier.SLOW, Pairing.ALTERNATING):
        off = 0.0  # its windows are checked before the incumbent comes
    assert found == pytest.approx(off, abs=0.01)


@pytest.mark.parametrize(("room_bytes", "pairing"), [(150_000, Pairing.ALTERNATING), (250_000, Pairing.SIDE_BY_SIDE)])
def test_sides_alternate_where_memory_does_not_hold_both(
    room_bytes: int, pairing: Pairing, deployment: Deployment, tmp_path: Path
) -> None:
    """A hundred kilobytes of derived weights each."""

    def build(built: Candidate, seconds: float) -> list[PartFiles]:
        path = tmp_path / f"{built.short_id}.safetensors"
        save_file({"made": torch.zeros(25_000)}, path)
        return [PartFiles(native={}, derived=({"model": path},))]

    with toy_engine(builder=build, room_bytes=room_bytes) as engine:
        engine.load(deployment, Tier.FAST)
        result = engine.measure(assignment(deployment, HONEST, incumbent=OFF))
    assert result.failure is None
    assert result.assignment.pairing is Pairing.SIDE_BY_SIDE
    assert result.pairing is pairing


def test_what_both_sides_share_is_held_once(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    assert pairing_within(Pairing.SIDE_BY_SIDE, {shared: 60}, {shared: 60, other: 40}, 100) is Pairing.SIDE_BY_SIDE
    assert pairing_within(Pairing.TWO_ENGINES, {shared: 60}, {other: 41}, 100) is Pairing.ALTERNATING


def test_a_reload_that_needs_more_than_declared_is_not_measured(deployment: Deployment) -> None:
    with toy_engine(program="understating_program:Program") as engine:
        engine.load(deployment, Tier.FAST)
        for pairing in (Pairing.SIDE_BY_SIDE, Pairing.ALTERNATING, Pairing.TWO_ENGINES):
            result = engine.measure(assignment(deployment, HONEST, pairing=pairing))
            assert (result.failure, result.blocks, result.checks) == (None, (), ())
            (report,) = [item for item in result.reloads if item.side is Side.CANDIDATE]
            assert report.understated


def test_a_cold_pair_runs_on_inputs_that_no_search_has_seen(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}

    def sources(seed: int, held_out: bool) -> TokenSource:
        return Recorded(RandomTokens(128, seed), drawn[held_out], 128 if held_out else 0)

    with toy_engine(sources=sources) as engine:
        engine.load(deployment, Tier.FAST)
        engine.measure(assignment(deployment, HONEST))
        known = set(drawn[False])
        order = assignment(deployment, HONEST, pairing=Pairing.TWO_ENGINES, purpose=Purpose.COLD, incumbent=OFF)
        result = engine.measure(order)
    assert result.failure is None
    assert drawn[False] == known
    assert {check.against for check in result.checks} == {"reference", "loaded", "incumbent"}
    assert all(check.bit_equal for check in result.checks if check.against != "incumbent")


class Recorded:
    """A source that notes what it gives; held-out tokens come from another half of the vocabulary."""

    def __init__(self, source: TokenSource, drawn: set[tuple[int, ...]], offset: int) -> None:
        self.source, self.drawn, self.offset = source, drawn, offset

    def draw(self, count: int) -> list[int]:
        tokens = [token + self.offset for token in self.source.draw(count)]
        self.drawn.add(tuple(tokens))
        return tokens


def test_a_crash_in_its_own_process_leaves_the_pair_child_alone(toy: DecoderEngine, deployment: Deployment) -> None:
    before = toy._loaded.pair().child.pid
    crash = candidate("os._exit(9)")
    result = toy.measure(assignment(deployment, crash, pairing=Pairing.TWO_ENGINES))
    assert result.failure is not None
    assert result.failure.kind is FailureKind.CRASH
    assert toy._loaded.pair().child.pid == before


def test_the_slow_tier_replays(toy: DecoderEngine, deployment: Deployment) -> None:
    result = toy.measure(assignment(deployment, HONEST, tier=Tier.SLOW, replay_requests=7))
    assert result.failure is None
    assert result.blocks == ()
    assert 3 <= len(result.replays) <= 4
    for replay in result.replays:
        for stats in (*replay.incumbent, *replay.candidate):
            assert (stats.num_requests, stats.output_tokens) == (7, 1 + 2 + 3 + 1 + 2 + 3 + 1)
            assert len(stats.ttft_ms) == 7
            assert len(stats.tpot_ms) == 4
            assert all(0 <= time <= stats.wall_seconds * 1e3 for time in stats.ttft_ms)
    assert {check.against for check in result.checks} == {"reference", "incumbent"}
    assert result.activation["model"] > 0


def test_a_clock_that_lies_about_both_sides_is_found_by_the_kernels(toy: DecoderEngine, deployment: Deployment) -> None:
    """The incumbent's word is no more worth than the candidate's: one process has one clock."""
    body = "end = time.thread_time() + 0.03\nwhile time.thread_time() < end: pass\nreturn reference(tokens, summaries)"
    slow = "real = time.perf_counter; time.perf_counter = lambda: real() / 1000"
    honest = toy.measure(assignment(deployment, candidate(body)))
    assert honest.failure is None
    result = toy.measure(assignment(deployment, candidate(body, setup=slow)))
    assert result.failure is not None
    assert result.failure.kind is FailureKind.PROTOCOL
    assert re.fullmatch(r"the child claims [\d.]+ s in a window in which it ran [\d.]+ s", result.failure.message)


def test_a_deadline_ends_the_rounds_with_what_there_is(toy: DecoderEngine, deployment: Deployment) -> None:
    endless = Stopping(min_rounds=3, max_rounds=100_000, half_width=1e-9, equal_margin=1e-9, alpha=1e-9)
    result = toy.measure(assignment(deployment, HONEST, deadline_seconds=3.0, stopping=endless))
    assert result.failure is None
    assert len(result.blocks) > 3


def test_a_birth_is_told_once_and_by_phase(toy: DecoderEngine, deployment: Deployment) -> None:
    toy._loaded.discard_pair()
    first, second = (toy.measure(assignment(deployment, HONEST)).phases_ms for _ in range(2))
    born = {name.removeprefix("birth/"): ms for name, ms in first.items() if name.startswith("birth/")}
    assert {"fork", "skeleton", "contexts", "first result", "answers", "a against a", "until first result"} <= set(born)
    assert born["fork"] + born["load"] + born["contexts"] + born["first result"] < 1.01 * born["until first result"]
    assert not any(name.startswith("birth/") for name in second)
    assert 0 < second["first result"] < second["measure"] < second["total"]


def test_install_generate_restore(toy: DecoderEngine, deployment: Deployment) -> None:
    report = toy.install(Side.CANDIDATE, HONEST)
    assert (report.candidate_id, report.slots) == (HONEST.id, ("model",))
    assert toy.generate(Side.CANDIDATE, [[1, 2], [50, 50]], 2) == [[3, 3], [3, 3]]
    toy.restore()
    assert toy.slots().names() == ("model",)


def test_scores_hold_a_candidate_against_the_reference(toy: DecoderEngine) -> None:
    same, off = (toy.score(part, 2, 9, 1, 0.01) for part in (HONEST, OFF))
    assert (same.texts, same.positions, same.agree, same.bit_equal) == (2, 18, 18, True)
    assert off.max_abs == pytest.approx(0.5, abs=0.01)
    assert off.agree == 18


def test_baselines_are_paired_with_as_loaded(toy: DecoderEngine) -> None:
    measured = toy.measure_baseline("transformers-eager-bf16", ROWS, 1, 20.0)
    assert measured.failure is None
    assert len(measured.blocks) >= 6
    assert measured.numerics == "lossy"
    assert all(check.bit_equal for check in measured.checks)


def test_a_result_is_small_plain_data(toy: DecoderEngine, deployment: Deployment) -> None:
    result = toy.measure(assignment(deployment, HONEST))
    assert len(canonical_json(json_safe(result))) < 20_000


def test_wrong_orders_are_refused(toy: DecoderEngine, deployment: Deployment) -> None:
    with pytest.raises(InputError, match="not in the shape table"):
        toy.measure(assignment(deployment, HONEST, rows=(replace(ROWS[0], context_mean=999),)))
    with pytest.raises(InputError, match="is empty"):
        toy.measure(assignment(deployment, HONEST, rows=()))
    with pytest.raises(InputError, match="is not known"):
        toy.measure_baseline("faster-transformers", ROWS, 1, 1.0)


def test_two_cuts_and_the_whole_model(deployment: Deployment) -> None:
    shallow = replace(deployment, hardware=replace(deployment.hardware, last_level_cache_bytes=1))
    with toy_engine() as engine:
        engine.load(shallow, Tier.FAST)
        assert [len(cut) for cut in engine.cuts] == [1, 2, 4]
        fast = engine.measure(assignment(deployment, HONEST))
        assert sorted(block.layers for block in fast.blocks[:4]) == [1, 1, 2, 2]
        assert all(check.bit_equal for check in fast.checks)
        slow = engine.measure(assignment(deployment, HONEST, tier=Tier.SLOW, replay_requests=2))
        assert slow.failure is None


def test_nothing_is_left_behind(deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    files, threads, others = open_files(), threading.active_count(), descendants()
    with toy_engine() as engine:
        engine.load(deployment, Tier.FAST)
        engine.measure(assignment(deployment, candidate("os._exit(1)")))
        engine.measure(assignment(deployment, HONEST))
        assert len(descendants() - others) == 3
    assert descendants() == others
    assert open_files() <= files
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_not_loaded_says_so(deployment: Deployment) -> None:
    with pytest.raises(EngineDied, match="is not loaded"):
        toy_engine().slots()


def test_a_program_that_cannot_be_imported_is_the_machines_fault(deployment: Deployment) -> None:
    before, others = open_files(), descendants()
    engine = DecoderEngine("broken", program="no_such_module:Program", threads=1)
    with pytest.raises(MachineError, match="no_such_module"):
        engine.load(deployment, Tier.FAST)
    assert descendants() == others
    assert open_files() <= before


def test_an_import_that_starts_a_thread_is_refused(deployment: Deployment) -> None:
    others = descendants()
    with pytest.raises(MachineError, match="started threads, a fork would hang"):
        toy_engine(program="threaded_program:Program").load(deployment, Tier.FAST)
    assert descendants() == others
