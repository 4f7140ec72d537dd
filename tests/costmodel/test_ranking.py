"""`plan`: ranked, pruned by reason, three kinds of no, costs, and what an interval says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.graph import ModelGraph
from costmodel.interval import Interval
from costmodel.machine import Machine, parse_machine
from costmodel.ranking import explain, plan
from costmodel.records import Asked, Objective
from costmodel.serving import Load
from hotpass.errors import InputError

LOAD = Load(input_tokens=1024, output_tokens=256)
QUICK = Asked(simulate=False, disaggregated=False)


def test_ranked_by_what_is_asked(dense: ModelGraph, machine: Machine) -> None:
    by_rate = plan(dense, machine, LOAD, QUICK)
    rates = [made.tokens_per_s_per_gpu.value for made in by_rate.plans]
    assert rates == sorted(rates, reverse=True)
    by_latency = plan(dense, machine, LOAD, replace(QUICK, objective=Objective.LATENCY))
    first = by_latency.plans[0]
    assert first.layout["tp"] == 8
    assert first.tpot_ms.value < by_rate.plans[0].tpot_ms.value
    assert by_rate.plans[0].layout["tp"] < 8


def test_frontier_is_undominated(dense: ModelGraph, machine: Machine) -> None:
    frontier = plan(dense, machine, LOAD, QUICK).frontier
    users, each = [p[1] for p in frontier], [p[2] for p in frontier]
    assert users == sorted(users, reverse=True)
    assert each == sorted(each)


def test_does_not_fit_and_misses_the_slo_are_different(dense: ModelGraph, machine: Machine) -> None:
    small = replace(machine, memory_bytes=5e9, num_devices=1)
    nothing = plan(dense, small, LOAD, QUICK)
    assert nothing.plans == ()
    assert nothing.pruned["does not fit into memory"] == nothing.considered == 20
    assert "misses the SLO" not in nothing.pruned
    assert nothing.fewest_gpus is None
    hurried = plan(dense, replace(machine, num_devices=1), LOAD, replace(QUICK, slo_tpot_ms=0.001))
    assert hurried.plans == ()
    assert hurried.pruned["misses the SLO"] == 20 - hurried.pruned.get("does not fit into memory", 0)


def test_memory_is_checked_to_the_last_byte(dense: ModelGraph, machine: Machine) -> None:
    alone = replace(machine, num_devices=1)
    asked = replace(QUICK, concurrency=400)
    need = plan(dense, alone, LOAD, asked).plans[0].memory_gb_per_gpu * 1e9
    assert need > 70e9  # so that what is reserved stays the same
    assert plan(dense, replace(alone, memory_bytes=need * (1 + 1e-12)), LOAD, asked).plans
    assert not plan(dense, replace(alone, memory_bytes=need * (1 - 1e-9)), LOAD, asked).plans


def test_clients_are_shared_between_replicas(dense: ModelGraph, machine: Machine) -> None:
    result = plan(dense, machine, LOAD, replace(QUICK, concurrency=64))
    for made in result.plans:
        assert made.gpus == made.replicas * made.layout["tp"] * made.layout["pp"] <= 16
        assert made.concurrency == -(-64 // made.replicas)


def test_costs_are_the_accelerators_time(dense: ModelGraph, machine: Machine) -> None:
    best = plan(dense, machine, LOAD, replace(QUICK, price_per_gpu_hour=3.6)).plans[0]
    assert best.cost_per_million_input is not None
    assert best.cost_per_million_output is not None
    per_request = (best.cost_per_million_input.value * 1024 + best.cost_per_million_output.value * 256) / 1e6
    requests_per_gpu = best.tokens_per_s_per_gpu.value / 256
    assert per_request == pytest.approx(3.6 / 3600 / requests_per_gpu)
    cost, rate = best.cost_per_million_output, best.tokens_per_s_per_gpu
    assert (cost.low * rate.high, cost.high * rate.low) == pytest.approx((cost.value * rate.value,) * 2)
    assert plan(dense, machine, LOAD, QUICK).plans[0].cost_per_million_input is None


def test_intervals_hold_their_value_and_widen_for_disputed_figures(dense: ModelGraph) -> None:
    sure, disputed = (plan(dense, parse_machine(name), LOAD, QUICK).plans[0].tpot_ms for name in ("h200", "b200"))
    assert sure.low < sure.value < sure.high
    assert Interval.around(10.0, 0.2).high == pytest.approx(10 * 2.7182818 ** (1.645 * 0.2))
    assert disputed.high / disputed.value > 1.0


def test_explained_operators_sum_to_the_step(routed: ModelGraph, machine: Machine) -> None:
    result = plan(routed, machine, LOAD, QUICK)
    rows = explain(routed, machine, LOAD, QUICK, result.plans[0])
    assert {row.phase for row in rows} == {"decode", "prefill"}
    assert sum(row.share for row in rows if row.phase == "decode") == pytest.approx(1.0)
    assert rows[0].milliseconds == max(row.milliseconds for row in rows if row.phase == "decode")


def test_disaggregated_plans_balance_two_pools(routed: ModelGraph, machine: Machine) -> None:
    result = plan(routed, machine, LOAD, Asked(simulate=False))
    apart = [made for made in result.plans if made.prefill_index is not None]
    assert apart
    for made in apart:
        assert made.gpus <= 16
        assert made.name.startswith("prefill ")


def test_the_best_are_simulated_and_goodput_ranks_them(dense: ModelGraph, machine: Machine) -> None:
    asked = Asked(objective=Objective.GOODPUT, slo_ttft_ms=2000, slo_tpot_ms=60, concurrency=16, disaggregated=False)
    result = plan(dense, machine, LOAD, asked)
    good = [made.simulated["goodput_per_gpu"] for made in result.plans if made.simulated]
    assert good == sorted(good, reverse=True)
    assert good[0] > 0
    assert result.plans[0].simulated is not None
    assert result.plans[0].simulated["cache_use"] <= 1.0


def test_unvalidated_parallelism_is_named(dense: ModelGraph, machine: Machine) -> None:
    staged = [made for made in plan(dense, machine, LOAD, QUICK).plans if made.layout["pp"] > 1]
    assert staged
    assert all(made.unvalidated == ("pp",) for made in staged)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slo_tpot_ms": -1.0}, "--slo-tpot-ms"),
        ({"slo_ttft_ms": float("nan")}, "--slo-ttft-ms"),
        ({"price_per_gpu_hour": 0.0}, "--price-per-gpu-hour"),
        ({"concurrency": 0}, "--concurrency"),
        ({"backend": "vlm"}, "did you mean 'vllm'"),
        ({"precision": "fp9"}, "did you mean 'fp8'"),
    ],
)
def test_impossible_questions_are_one_sentence(
    dense: ModelGraph, machine: Machine, change: dict[str, object], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        plan(dense, machine, LOAD, replace(QUICK, **change))


def test_traffic_beyond_the_context_is_refused(dense: ModelGraph, machine: Machine) -> None:
    with pytest.raises(InputError, match="131072 tokens of dense-8b"):
        plan(dense, machine, Load(input_tokens=131072, output_tokens=1), QUICK)


def test_a_table_for_programs(dense: ModelGraph, machine: Machine) -> None:
    frame = plan(dense, machine, LOAD, QUICK).dataframe()
    assert {"plan", "tp", "ttft_ms", "tpot_ms_low", "tokens_per_s_per_gpu_high", "source"} <= set(frame.columns)
    assert (frame.tpot_ms_low < frame.tpot_ms).all()
