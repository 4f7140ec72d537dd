"""`hotpass plan`: ranked plans before anything is measured, and `--validate`: how far such predictions can be trusted."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.planning import question
from hotpass.canonical import to_plain
from hotpass.decode import json_safe
from hotpass.errors import InputError, nearest

if TYPE_CHECKING:
    from costmodel.interval import Interval
    from costmodel.records import OperatorRow, Plan, PlanResult


def run(arguments: argparse.Namespace) -> int:
    if arguments.validate and Path(arguments.validate).is_dir():
        return learn(Path(arguments.validate), arguments.kernels, as_json=arguments.json)
    if arguments.validate:
        return validate(Path(arguments.validate), as_json=arguments.json, save=arguments.save_calibration)
    if arguments.model is None:
        raise InputError("--model", "(missing)", "is needed", "see hotpass plan --help")
    asked = question(
        arguments.model, arguments.hardware, arguments.traffic, gpus=arguments.gpus, concurrency=arguments.concurrency,
        slo_ttft_ms=arguments.slo_ttft_ms, slo_tpot_ms=arguments.slo_tpot_ms, objective=arguments.objective,
        price_per_gpu_hour=arguments.price_per_gpu_hour, backend=arguments.backend, precision=arguments.precision,
        kv_dtype=arguments.kv_dtype, disaggregated=not arguments.no_disaggregated, simulate=not arguments.no_simulate,
        calibration=arguments.calibration, kernels=arguments.kernels,
    )  # fmt: skip
    result = asked.answer()
    explained = asked.explain(find_plan(result, arguments.explain)) if arguments.explain else []
    if arguments.plot:
        from cluster.plan_chart import draw

        draw(result, Path(arguments.plot))
    if arguments.json:
        plain = json_safe(replace(result, asked=replace(result.asked, jobs=(), kernels=None)))
        plain["asked"]["jobs"] = len(result.asked.jobs)
        plain["asked"]["kernels"] = result.asked.kernels.name if result.asked.kernels else None
        plain["asked"]["corrections"] = result.asked.corrections.version if result.asked.corrections else None
        print(json.dumps({**plain, "plans": plain["plans"][: arguments.top], "explained": json_safe(explained)}))
    else:
        _print(result, explained, arguments.top)
    return 0 if result.plans else 1


def microbench(arguments: argparse.Namespace) -> int:
    """Time kernels on this machine; prints where the rows are."""
    from engines.microbench import microbench as run_it

    print(run_it(Path(arguments.out), threads=arguments.threads, seconds=arguments.seconds))
    return 0


def learn(folder: Path, kernels: str | None, *, as_json: bool) -> int:
    """Learn from a campaign's passes: what each kind of operator takes beside what its kernels promise."""
    from cluster.learning import learn_campaign

    if kernels is None:
        raise InputError(
            "--kernels", "(missing)", "is needed to learn from a campaign", "run `hotpass microbench` and name its file"
        )
    found = learn_campaign(folder, Path(kernels))
    if as_json:
        print(json.dumps(json_safe({**to_plain(found), "version": found.fit.version})))
        return 0
    error = found.fit.held_out_error
    print(
        f"fit {found.fit.version} of {found.num_passes} passes: {error:.1%} median error on shapes left out, {found.zero_shot_error:.1%} without"
    )
    for group in found.groups:
        factors = ", ".join(
            f"{name.removesuffix('_ms')} {value:.2f}" for name, value in found.fit.factors.of(group).items()
        )
        print(f"  {group}: times the kernels' own: {factors}")
    return 0


def validate(path: Path, *, as_json: bool, save: str | None) -> int:
    """Score the cost model on measured rows, zero-shot; with `save`, fit corrections to them too."""
    from costmodel.calibration import fit_corrections
    from costmodel.measured import predict_rows, read_rows
    from costmodel.validate import validate as score

    rows = read_rows(path)
    predicted = predict_rows(rows)
    found = score(rows, predicted)
    if save:
        fitted = fit_corrections(rows, predicted)
        fitted.save(Path(save))
        for one in (fitted.tpot, fitted.ttft):
            print(
                f"{save}: {one.target} fitted to {one.num_rows} rows of {len(one.architectures)} architectures, "
                f"{one.held_out_error:.1%} median error on those left out",
                file=sys.stderr,
            )
    if as_json:
        print(json.dumps(json_safe(found)))
        return 0
    print(f"{found.rows} rows, {found.answered:.1%} answered")
    for reason, count in found.refused.items():
        print(f"{count:8d}  refused: {reason}")
    print(f"\n{'error p50':>10} {'p90':>8} {'p99':>8} {'rank':>6} {'in 90 %':>8} {'rows':>6}")
    for name, score_ in found.scores.items():
        print(
            f"{score_.p50:10.1%} {score_.p90:8.1%} {score_.p99:8.1%} {score_.spearman:6.2f} {score_.coverage90:8.1%} {score_.rows:6d}  {name}"
        )
    lost = found.regret
    if lost.groups:
        print(
            f"\n{lost.groups} groups: the kept hold a choice within 5 % of the best in {lost.kept_within_5_percent:.0%};"
        )
        print(
            f"in {lost.covered_within_5_percent:.0%} where they are spread over what is uncertain, in "
            f"{lost.in_turn_within_5_percent:.0%} where each is measured before the next is chosen;"
        )
        print(f"the first choice loses {lost.top1_median:.1%} (median), {lost.top1_p90:.1%} (p90)")
    for name in found.broken:
        print(f"off by more than a factor of 5, measured or read wrongly: {name}")
    return 0


def find_plan(result: PlanResult, name: str) -> Plan:
    """By rank (1 is the best) or by name."""
    if name.isdigit() and 1 <= int(name) <= len(result.plans):
        return result.plans[int(name) - 1]
    for made in result.plans:
        if made.name == name:
            return made
    raise InputError(
        "--explain", name, "is no rank or plan of this answer", nearest(name, [p.name for p in result.plans[:20]])
    )


def _print(result: PlanResult, explained: list[OperatorRow], top: int) -> None:
    load = result.load
    print(f"{result.model} on {result.hardware}, {load.input_tokens:.0f} tokens in, {load.output_tokens:.0f} out")
    print(f"predicted from {result.source}; in brackets 90 % intervals\n")
    for line in table(result, top) if result.plans else ["no plan is possible"]:
        print(line)
    if result.fewest_gpus is not None:
        print(f"\nfewest GPUs that hold the limits: {result.fewest_gpus}")
    if result.next_measurement is not None:
        print(f"measuring this would tell most: {result.next_measurement}")
    print(f"\n{result.considered} plans priced; left out:")
    for reason, count in result.pruned.items():
        print(f"{count:8d}  {reason}")
    for figure in result.disputed:
        print(f"sources disagree about {figure} of {result.hardware}: intervals are wider")
    for note in result.notes:
        print(note)
    if result.asked.price_per_gpu_hour is not None:
        print("costs: the GPUs' time, charged to input and output by the time that prefill and decode take")
    for phase in dict.fromkeys(row.phase for row in explained):
        rows = [row for row in explained if row.phase == phase]
        print(f"\n{phase} step, {sum(row.milliseconds for row in rows):.3f} ms")
        for row in rows:
            print(f"{row.milliseconds:11.3f} ms {row.share:6.1%}  {row.operator:<32} {row.kind:<14} {row.source}")


def table(result: PlanResult, top: int) -> list[str]:
    """The first `top` plans as aligned lines; the plan's name last, since it is the longest."""
    priced = result.asked.price_per_gpu_hour is not None
    head = ["", "GPUs", "TTFT ms", "TPOT ms", "tok/s/user", "tok/s/GPU", "GB/GPU"]
    rows = [[*head, *(("per M in", "per M out") if priced else ()), "source", "plan"]]
    for rank, made in enumerate(result.plans[:top], 1):
        costs = [span(cost, 3) for cost in (made.cost_per_million_input, made.cost_per_million_output) if cost]
        note = f" ({', '.join(made.unvalidated)} unvalidated)" if made.unvalidated else ""
        figures = (made.ttft_ms, made.tpot_ms, made.tokens_per_s_per_user, made.tokens_per_s_per_gpu)
        memory = f"{made.memory_gb_per_gpu:.1f}"
        rows.append([str(rank), str(made.gpus), *map(span, figures), memory, *costs, made.source, made.name + note])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = len(widths) - 2
    return [
        "  ".join(
            cell.rjust(w) if n < right else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def span(interval: Interval, digits: int = 1) -> str:
    """As `12.3 [9.8 15.4]`."""
    digits = digits if interval.value < 1000 else 0
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f} {interval.high:.{digits}f}]"
