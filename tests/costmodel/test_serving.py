"""The steady state and the event-by-event simulation: by hand where a hand can, against each other elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.graph import ModelGraph
from costmodel.machine import Machine
from costmodel.operators import Layout, Roofline
from costmodel.serving import Load, burst_wait, closed_loop, disaggregated, queue_wait, steady_state
from costmodel.simulate import Job, StepTimes, simulate

FLAT = StepTimes(
    batches=np.array([1.0, 1000.0]),
    contexts=np.array([1.0, 1e6]),
    decode_s=np.full((2, 2), 0.01),
    chunks=np.array([0.0, 1e6]),
    prefill_s=np.array([0.0, 100.0]),  # 0.1 ms a token
)


def arr(*values: float) -> np.ndarray:
    return np.array(values, float)


def test_one_client_never_waits(dense: ModelGraph, machine: Machine) -> None:
    load = Load(input_tokens=1000, output_tokens=100)
    one = steady_state(dense, Layout.of(), Roofline(machine), load, arr(1))
    assert one.tpot_s[0] == pytest.approx(one.decode.seconds[0])
    assert one.ttft_s[0] == pytest.approx(one.prefill.seconds[0])
    assert one.requests_per_s[0] == pytest.approx(1 / (one.ttft_s[0] + 99 * one.tpot_s[0]))


def test_others_prefills_are_paid_between_tokens(dense: ModelGraph, machine: Machine) -> None:
    load = Load(input_tokens=1000, output_tokens=100)
    many = steady_state(dense, Layout.of(), Roofline(machine), load, arr(33))
    prefill, decode = many.prefill.seconds[0], many.decode.seconds[0]
    # 32 others prefill once while this one decodes 100 tokens, but for those that are taken while it waits.
    most = 32 / 100 * prefill
    assert 0.95 * most < many.tpot_s[0] - decode < most
    assert many.ttft_s[0] < prefill + 2 * decode


def test_a_waiting_prompt_sees_full_steps() -> None:
    # Prompts of two whole steps, answers of ten: 16 clients keep every step full, so each cycle takes 32 steps of 1 + 0.1 s.
    loop = closed_loop(arr(16), arr(2.0), arr(0.1), arr(2000), 10.0, chunk_tokens=1000)
    assert loop.ttft_s[0] + 10 * loop.tpot_s[0] == pytest.approx(32 * 1.1, rel=0.05)
    assert loop.tpot_s[0] == pytest.approx(1.1, rel=0.05)
    alone = closed_loop(arr(1), arr(2.0), arr(0.1), arr(2000), 10.0, chunk_tokens=1000)
    assert (alone.ttft_s[0], alone.tpot_s[0]) == (pytest.approx(2.0), pytest.approx(0.1))


@pytest.mark.parametrize(
    ("clients", "prompt", "answer"), [(8, 1000, 200), (32, 4000, 128), (64, 500, 1000), (24, 8000, 64)]
)
def test_the_closed_form_is_what_the_simulation_plays(clients: int, prompt: int, answer: int) -> None:
    loop = closed_loop(arr(clients), arr(prompt * 1e-4), arr(0.01), arr(prompt), answer, chunk_tokens=2000)
    lengths = np.random.default_rng(5).integers(int(0.8 * answer), int(1.2 * answer), 12 * clients)
    jobs = [Job(input_tokens=prompt, output_tokens=int(n)) for n in lengths]
    done = simulate(jobs, FLAT, cache_tokens=10**8, max_batch=clients, chunk_tokens=2000, clients=clients)
    settled = slice(3 * clients, -2 * clients)
    assert done.tpot_s[settled].mean() == pytest.approx(loop.tpot_s[0], rel=0.1)
    assert done.ttft_s[settled].mean() == pytest.approx(loop.ttft_s[0], rel=0.35)


def test_a_burst_puts_half_of_the_others_ahead() -> None:
    assert burst_wait(arr(11), arr(0.2), arr(0.01), arr(1000), 1000)[0] == pytest.approx(5 * (0.2 + 0.005))


def test_a_cached_prefix_is_not_prefilled(dense: ModelGraph, machine: Machine) -> None:
    source, layout = Roofline(machine), Layout.of()
    cold = steady_state(dense, layout, source, Load(input_tokens=8000, output_tokens=100), arr(1))
    warm = steady_state(dense, layout, source, Load(input_tokens=8000, output_tokens=100, cached_share=0.9), arr(1))
    assert warm.prefill.seconds[0] < 0.25 * cold.prefill.seconds[0]
    assert warm.tpot_s[0] == pytest.approx(cold.tpot_s[0])


def test_queue_has_its_two_ends() -> None:
    # Away for very long: nobody waits. Away for no time: everyone but oneself is ahead, one of them half served.
    assert queue_wait(arr(10), arr(1), arr(1e9))[0] == pytest.approx(0, abs=1e-6)
    assert queue_wait(arr(10), arr(1), arr(0))[0] == pytest.approx(8.5, rel=0.1)


def test_disaggregated_is_bound_by_its_slower_half() -> None:
    load = Load(input_tokens=1000, output_tokens=100)
    pairs = disaggregated(
        prefill_s=arr(0.1, 10.0), decode_s=arr(0.01, 0.01), prefill_lanes=arr(1, 1), concurrency=arr(4, 4), load=load,
        cache_bytes=1e9, link_bytes_per_s=arr(1e10, 1e10),
    )  # fmt: skip
    assert pairs.tpot_s[0] == 0.01
    assert pairs.transfer_s[0] == pytest.approx(0.1)
    assert pairs.requests_per_s[0] < 4 / (0.1 + 0.1 + 0.01 + 99 * 0.01) + 1e-9
    assert pairs.requests_per_s[1] == pytest.approx(0.1, rel=0.01)


def test_a_single_request_by_hand() -> None:
    done = simulate([Job(input_tokens=100, output_tokens=11)], FLAT, cache_tokens=1000, max_batch=4, clients=1)
    assert done.ttft_s[0] == pytest.approx(0.01)
    assert done.tpot_s[0] == pytest.approx(0.01)
    assert done.seconds == pytest.approx(0.01 + 10 * 0.01)
    assert done.peak_cache_tokens == 111


def test_arrivals_are_waited_for() -> None:
    jobs = [Job(input_tokens=100, output_tokens=2, arrival_s=at) for at in (0.0, 5.0)]
    done = simulate(jobs, FLAT, cache_tokens=1000, max_batch=4)
    assert done.seconds == pytest.approx(5.0 + 0.01 + 0.01)
    assert done.ttft_s == pytest.approx([0.01, 0.01])


def test_chunks_delay_the_running() -> None:
    jobs = [
        Job(input_tokens=1, output_tokens=100, arrival_s=0.0),
        Job(input_tokens=1000, output_tokens=2, arrival_s=0.1),
    ]
    whole = simulate(jobs, FLAT, cache_tokens=10_000, max_batch=4, chunk_tokens=1000)
    chunked = simulate(jobs, FLAT, cache_tokens=10_000, max_batch=4, chunk_tokens=100)
    assert whole.seconds == pytest.approx(chunked.seconds, rel=0.02)
    # Ten chunks ride beside ten decode steps instead of one.
    assert chunked.ttft_s[0] > whole.ttft_s[0] + 8 * 0.01


def test_a_full_cache_preempts_and_all_finish() -> None:
    jobs = [Job(input_tokens=50, output_tokens=100) for _ in range(4)]
    done = simulate(jobs, FLAT, cache_tokens=300, max_batch=4, clients=4)
    assert done.preemptions > 0
    assert len(done.ttft_s) == 4
    assert done.peak_cache_tokens <= 300


def test_what_can_never_fit_is_refused_not_looped() -> None:
    done = simulate([Job(input_tokens=500, output_tokens=1)] * 3, FLAT, cache_tokens=300, max_batch=2, clients=2)
    assert (done.refused, len(done.ttft_s)) == (3, 0)


def test_prefix_cache_answers_shared_blocks() -> None:
    jobs = [Job(input_tokens=64, output_tokens=2, prefix=(1, 2, 3, 4 + n)) for n in range(3)]
    done = simulate(jobs, FLAT, cache_tokens=10_000, max_batch=1, clients=1, block_tokens=16)
    assert done.cached_tokens == 2 * 48
    assert done.ttft_s[1] < done.ttft_s[0]


def test_simulation_and_steady_state_agree_on_throughput(dense: ModelGraph, machine: Machine) -> None:
    load = Load(input_tokens=500, output_tokens=200)
    steady = steady_state(dense, Layout.of(), Roofline(machine), load, arr(16))
    decode, prefill = float(steady.decode.seconds[0]), float(steady.prefill.seconds[0])
    times = StepTimes(
        batches=arr(1, 1000), contexts=arr(1, 1e6), decode_s=np.full((2, 2), decode), chunks=arr(0, 1000),
        prefill_s=arr(0, 2 * prefill),
    )  # fmt: skip
    jobs = [Job(input_tokens=500, output_tokens=150 + 10 * (n % 11)) for n in range(320)]
    done = simulate(jobs, times, cache_tokens=10**6, max_batch=16, clients=16)
    assert 320 / done.seconds == pytest.approx(float(steady.requests_per_s[0]), rel=0.1)
    assert done.goodput(1e9, 1e9) == pytest.approx(320 / done.seconds)
    assert done.goodput(0.0, 1e9) == 0.0
