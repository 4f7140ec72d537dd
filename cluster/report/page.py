"""The report's page: one HTML text with style and charts inside, that asks nothing of the network and runs no script.

Sections are functions from the gathered data to HTML; whatever came from a candidate is escaped, and is shown as data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from cluster.live import clock_text
from cluster.plan import may_build_ahead
from cluster.predicting import shown
from cluster.report import charts
from cluster.report.board import board_section, llm_section
from cluster.report.data import ReportData, rejected_rows
from cluster.report.front import front_section
from cluster.report.proposers import proposers_section
from cluster.report.reloads import reload_costs
from hotpass.records.measurement import Estimate, Purpose, Verdict

COLOURS = {Verdict.FASTER: charts.GREEN, Verdict.SLOWER: charts.GREY, Verdict.INCONCLUSIVE: charts.BLUE}
SHOWN_REJECTED = 60
DENOMINATORS = {
    "speedup_vs_loaded": "the deployment as loaded",
    "speedup_vs_best_same_class": "the best baseline of its numerics class or a narrower one",
    "speedup_vs_best_as_accurate": "the best baseline at least as accurate",
}


def render(data: ReportData) -> str:
    """The whole page."""
    style = files("cluster.report").joinpath("style.css").read_text(encoding="utf-8")
    plan = data.plan
    title = f"{plan.deployment.model.name} · {plan.deployment.traffic.name} · {plan.deployment.hardware.name}"
    sections = [
        _header(data, title), _claims(data), _progress(data), front_section(data.plan, data.state), proposers_section(data.state), _gains(data), _shapes(data),
        _baselines(data), _rejected(data), _reloads(data), board_section(data), llm_section(data), _sources(data), _environment(data), _reproduce(data),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>hotpass · {escape(title)}</title><style>{style}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<footer>Written by hotpass {escape(plan.versions.get('hotpass', ''))} from the event log of campaign "
        f"{escape(plan.campaign)} ({data.state.last_seq} events).</footer>\n</main></body></html>\n"
    )


def _header(data: ReportData, title: str) -> str:
    state, result = data.state, data.state.result or {}
    shown = data.shown
    if shown is not None and shown.speedup_vs_loaded is not None:
        estimate = shown.speedup_vs_loaded
        cold = shown.attempt.purpose is Purpose.COLD
        standing = (
            "over the deployment as loaded, measured again cold"
            if cold
            else "over the deployment as loaded, so far (not yet measured cold)"
        )
        claim = (
            f'<div class="claim"><div class="big">{estimate.value:.2f}×</div>'
            f'<div class="ci">{estimate.level:.0%} interval {estimate.low:.2f} to {estimate.high:.2f} {_tag(estimate.kind)}</div>'
            f"<div>{standing}</div><div class=what>{escape(state.label_of(shown.attempt.candidate_id))}</div></div>"
        )
    else:
        claim = '<div class="claim none"><div class="big">1.00×</div><div>nothing was proven faster than the deployment as loaded</div></div>'
    best = result.get("best") or {}
    gates = result.get("gates") or {}
    passed = sum(text == "pass" for text in gates.values())
    bound = best.get("bound_fraction")
    rate = shown.attempt.tokens_per_second if shown else None
    numerics = state.candidates[shown.attempt.candidate_id].numerics if shown else "-"
    cards = [
        (str(result.get("verdict", "running")), "verdict"),
        (f"{rate:.1f}" if rate else "-", "output tokens/s over the shape table"),
        (f"{bound:.0%}" if bound is not None else "not known", "of the physical bound"),
        (numerics, "numerics class"),
        (f"{passed} of {len(gates)}" if gates else "not run", "gates passed"),
        (
            f"{len(state.search_attempts())}",
            f"attempts in {clock_text(state.elapsed_seconds)} ({state.attempts_per_hour():.0f}/h)",
        ),
    ]
    boxes = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in cards
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in data.plan.notes)
    return (
        f'<header><p class="kicker">hotpass campaign {escape(data.plan.campaign)} · {escape(data.plan.created)}</p><h1>{escape(title)}</h1>'
        f'<div class="hero">{claim}<div class="cards">{boxes}</div></div>'
        + (f"<ul class=legend>{notes}</ul>" if notes else "")
        + "</header>"
    )


def _claims(data: ReportData) -> str:
    result = data.state.result or {}
    best, gates = result.get("best"), result.get("gates") or {}
    if not best and not gates:
        return ""
    rows = []
    for key, words in DENOMINATORS.items():
        claim = (best or {}).get(key)
        if claim:
            low, high = claim["ci95"]
            rows.append([words, escape(claim["baseline"]), f"<b>{claim['value']:.2f}×</b>", f"{low:.2f} to {high:.2f}"])
        elif best:
            rows.append([words, "none in this session", "-", "-"])
    claims = _table(["over", "which is", ">speedup", ">interval"], rows) if rows else ""
    seen = (data.state.winner or data.state.no_winner).get("gate_evidence", {})
    checks = _table(
        ["gate", "", "evidence"],
        [
            [escape(name), _tag(text.split(":")[0].split()[0], text.split(":")[0]), escape(seen.get(name, "-"))]
            for name, text in gates.items()
        ],
    )
    return (
        "<h2>What is claimed</h2><p class=lead>Only the cold measurement is claimed: both sides in fresh processes, interleaved, on inputs that the "
        "search never used. Every denominator was measured in the same session.</p>"
        + claims
        + "<h3>Gates</h3>"
        + checks
    )


def _progress(data: ReportData) -> str:
    state = data.state
    points = [
        charts.Point(
            seconds=row.elapsed_seconds,
            value=row.speedup_vs_loaded.value,
            colour=COLOURS[row.attempt.verdict],
            text=f"{state.label_of(row.attempt.candidate_id)}: {row.speedup_vs_loaded.value:.2f}×, {row.attempt.tier}, {row.attempt.reason}",
        )
        for row in state.search_attempts()
        if row.speedup_vs_loaded and row.attempt.purpose is not Purpose.COLD
    ]
    steps = [(step.elapsed_seconds, step.speedup_vs_loaded.value) for step in state.incumbents]
    shown, cold = data.shown, None
    if shown and shown.speedup_vs_loaded and shown.attempt.purpose is Purpose.COLD:
        e = shown.speedup_vs_loaded
        cold = charts.Bar(label="", value=e.value, low=e.low, high=e.high, colour="", text=f"{e.value:.2f}× cold")
    legend = (
        f'<p class=legend><i style="background:{charts.GREEN}"></i>faster, and the incumbent as a line'
        f'<i style="background:{charts.BLUE}"></i>inconclusive<i style="background:{charts.GREY}"></i>slower'
        f'<i style="background:{charts.ORANGE}"></i>the winner measured cold</p>'
    )
    tau = (
        ""
        if data.tau is None
        else f" Kendall's tau between the fast and the slow tier is {data.tau:.2f} over {data.tau_pairs} candidates."
    )
    return (
        f"<h2>Best so far</h2><p class=lead>Every attempt with a time, over the deployment as loaded (chained through the incumbents that they were paired with). "
        f"{escape(state.stop_reason and 'The search ended: ' + state.stop_reason + '.')}{tau}</p>"
        + charts.progress(points, steps, state.elapsed_seconds, cold)
        + legend
    )


def _gains(data: ReportData) -> str:
    shown = [gain for gain in data.gains if gain.alone is not None][:24]
    bars = [
        charts.Bar(
            label=gain.name,
            value=gain.alone.value,
            low=gain.alone.low,
            high=min(gain.alone.high, gain.alone.value * 2),
            colour=charts.GREEN if gain.in_winner else charts.GREY,
            text=f"{gain.alone.value:.2f}× alone" + (f", {gain.best.value:.2f}× best" if gain.best else ""),
        )
        for gain in shown
        if gain.alone is not None
    ]
    if not bars:
        return ""
    return (
        "<h2>Gain by part</h2><p class=lead>Each part or setting as the only change to the deployment as loaded (best parameters), and the best "
        "composition that it is in. Green: in the winner.</p>" + charts.bars(bars) + _taken_apart(data)
    )


def _taken_apart(data: ReportData) -> str:
    """The shown candidate as a product of effects, and how far such expectations held."""
    found, trust = data.taken_apart, data.trust
    if found is None or not found.effects:
        return ""
    bars = [
        charts.Bar(
            label=shown(effect.thing),
            value=effect.speedup.value,
            low=effect.speedup.low,
            high=min(effect.speedup.high, effect.speedup.value * 2),
            colour=charts.GREEN if effect.speedup.low > 1 else charts.GREY,
            text=f"{effect.speedup.value:.2f}× ({effect.pairs} pairs)",
        )
        for effect in found.effects[:24]
    ]
    beyond = f"; measured is {found.beyond:.2f} times that, by how they act together" if found.beyond else ""
    held = (
        f" {trust.measured} expectations could be checked: median error {trust.median_error:.1%}, "
        f"{trust.within_90:.0%} within their 90 % intervals; {trust.pruned} candidates were left out, {trust.audited} audited."
        if trust.median_error is not None and trust.within_90 is not None
        else ""
    )
    return (
        "<h3>What bought how much</h3><p class=lead>Effects that add in log time, learned from every pair that the fast tier timed "
        f"(predicted, 90 % intervals). Their product is {found.predicted.value:.2f}×{beyond}.{held}</p>"
        + charts.bars(bars)
    )


def _shapes(data: ReportData) -> str:
    table = data.plan.deployment.shapes
    times = {item.row.key: item for item in data.rows}
    rows = []
    for row in table.rows:
        found = times.get(row.key)
        cells = [
            row.phase.value, f"{row.num_seqs}", f"{row.query_tokens}", f"{row.context_mean} / {row.context_max}", f"{row.steps_share:.1%}", f"{row.tokens_share:.1%}",
        ]  # fmt: skip
        cells += (
            [
                f"{found.incumbent_ms:.3g}",
                f"{found.candidate_ms:.3g}",
                f"<b>{found.incumbent_ms / found.candidate_ms:.2f}×</b>",
                f"{found.floor_ms:.3g}" if found.floor_ms else "-",
            ]
            if found
            else ["-"] * 4
        )
        rows.append(cells)
    head = [
        "phase",
        ">sequences",
        ">query tokens",
        ">context mean / max",
        ">of steps",
        ">of output tokens",
        ">as loaded, ms",
        ">candidate, ms",
        ">speedup",
        ">floor, ms",
    ]
    body = _table(head, rows)
    drawn = [(item.row.key, item.incumbent_ms, item.candidate_ms, item.floor_ms) for item in data.rows]
    chart = ""
    if drawn:
        chart = "<h3>Step time against the physical floor</h3>" + charts.floors(drawn) + (
            f'<p class=legend><i style="background:{charts.GREY}"></i>as loaded<i style="background:{charts.GREEN}"></i>candidate'
            f'<i style="background:{charts.RED}"></i>floor: the file\'s own weights and the KV cache read once at the measured bandwidth, or its FLOPs at the measured rate</p>'
        )  # fmt: skip
    return (
        f"<h2>Shape table</h2><p class=lead>The steps that this traffic makes at concurrency {table.concurrency}, counted over {table.num_steps:,} steps; "
        f"{table.output_tokens_per_step:.3f} output tokens a step. Times are {data.kind}, geometric means over the windows of the attempt shown above.</p>"
        + body
        + chart
    )


def _baselines(data: ReportData) -> str:
    state = data.state
    own = [row for row in state.attempts if row.attempt.purpose is Purpose.AA]
    rows = []
    for row in own:
        noise = f"; noise floor {data.noise_floor:.2%} a block" if data.noise_floor is not None else ""
        rows.append(
            [
                "A/A: as loaded against itself",
                "-",
                _ratio(row.attempt.speedup),
                "-",
                "-",
                escape(row.attempt.reason + noise),
            ]
        )
    for baseline in state.baselines:
        error = baseline.numerics_measured.get("max_abs")
        rows.append(
            [
                escape(baseline.name),
                escape(baseline.numerics),
                "-" if baseline.failure else _ratio(baseline.speedup),
                f"{baseline.tokens_per_second:.1f}" if baseline.tokens_per_second else "-",
                f"{error:.2g}" if error is not None else "-",
                escape(baseline.failure),
            ]
        )
    if data.shown:
        attempt = data.shown.attempt
        error = attempt.numerics_measured.get("max_abs")
        rows.append(
            [f"<b>{escape(state.label_of(attempt.candidate_id))}</b>", escape(state.candidates[attempt.candidate_id].numerics), _ratio(data.shown.speedup_vs_loaded),
             f"{attempt.tokens_per_second:.1f}" if attempt.tokens_per_second else "-", f"{error:.2g}" if error is not None else "-", f"{attempt.purpose}: {escape(attempt.reason)}"]
        )  # fmt: skip
    return (
        "<h2>Baselines and the A/A row</h2><p class=lead>Transformers' own loops on the same windows in the same session, and the deployment as loaded against "
        "itself: what this method calls equal. The logit difference is the largest to the reference, the file's own values computed in fp32.</p>"
        + _table(["what", "class", ">over as loaded", ">tokens/s", ">logit difference", "note"], rows)
    )


def _rejected(data: ReportData) -> str:
    rows = rejected_rows(data.state)
    if not rows:
        return ""
    shown = rows[:SHOWN_REJECTED]
    body = _table(
        ["verdict", "tier", "candidate", "reason", ">at"],
        [
            [
                _tag(row.attempt.verdict),
                row.attempt.tier.value,
                escape(data.state.label_of(row.attempt.candidate_id)),
                escape(row.attempt.reason),
                clock_text(row.elapsed_seconds),
            ]
            for row in shown
        ],
    )
    counts = ", ".join(f"{count} {why}" for why, count in data.state.rejected().most_common())
    broken = "".join(f"<li>{escape(what)}: {escape(why)}</li>" for what, why in data.state.broken.items())
    given_up = (
        f"<p>Not tried any more, since its candidates failed alike:</p><ul class=legend>{broken}</ul>" if broken else ""
    )
    more = f" The first {SHOWN_REJECTED} of {len(rows)} are listed." if len(rows) > len(shown) else ""
    return f"<h2>Rejected candidates</h2><p class=lead>{escape(counts)}.{more}</p>{given_up}<details{' open' if len(rows) <= 12 else ''}><summary>{len(shown)} attempts with their reasons</summary><div class=scroll>{body}</div></details>"


def _reloads(data: ReportData) -> str:
    costs = reload_costs(data.state.results.values())
    if not costs:
        return ""
    rows = [
        [
            cost.kind.value,
            f"{cost.attempts}",
            f"{cost.costlier_than_declared or '-'}",
            f"{cost.install_ms:.0f}",
            f"{cost.warm_up_ms:.0f}",
            f"{cost.return_ms:.0f}" if cost.return_ms else "-",
            f"{cost.total_seconds:.1f}",
        ]
        for cost in costs
    ]
    head = [
        "class", ">attempts", ">declared cheaper", ">install, ms", ">of it first passes, ms", ">restore and proof, ms", ">together, s",
    ]  # fmt: skip
    return (
        "<h2>Reloads</h2><p class=lead>What putting candidates on and taking them off cost, by what the reload turned out to be: medians over attempts, "
        "and their sum. Builders' work is not in it.</p>" + _table(head, rows) + _builders(data)
    )


def _builders(data: ReportData) -> str:
    """What building cost, and whether an engine could measure meanwhile."""
    state = data.state
    beside = may_build_ahead(data.plan)
    return (
        f"<p class=lead>Builders took {state.build_core_seconds:.0f} core-seconds in {state.build_seconds:.0f} s of builds. "
        + (
            "They worked beside measurements, on cores of their own.</p>"
            if beside
            else "On this machine a compiler would disturb what is measured: builders stood still during measurements, and engines waited for what "
            "was not built while they were loading, so building ahead gained a factor of 1.</p>"
        )
    )


def _sources(data: ReportData) -> str:
    if data.candidate is None:
        return ""
    blocks = []
    for diff in data.diffs:
        against = f"against the reference of {escape(diff.against)}" if diff.against else "new file"
        body = "".join(f'<span class="{_kind_of(line)}">{escape(line) or " "}</span>' for line in diff.lines)
        blocks.append(
            f"<details><summary>{escape(diff.title)} · {against} · {sum(line.startswith('+') for line in diff.lines)} lines added</summary><div class=scroll><pre class=diff>{body}</pre></div></details>"
        )
    settings = "".join(
        f"<li><code>{escape(name)} = {escape(str(value))}</code></li>"
        for name, value in data.candidate.settings.items()
    )
    uses = "".join(
        f"<li><b>{escape(use.source.name)}</b> {escape(json.dumps(dict(use.params), ensure_ascii=False))} · sha256 <code>{use.source.sha256[:16]}</code></li>"
        for use in data.candidate.parts
    )
    return (
        f"<h2>The candidate's sources</h2><p class=lead>{escape(data.candidate.id)}</p><ul>{uses}{settings}</ul>"
        + "".join(blocks)
    )


def _environment(data: ReportData) -> str:
    deployment, environment = data.plan.deployment, data.environment
    model, hardware = deployment.model, deployment.hardware
    rows = [
        ["model", f"{escape(model.name)} · {escape(model.architecture)} · {model.num_layers} layers · {model.num_params / 1e6:.1f} M parameters · {escape(model.dtype)} · {escape(', '.join(model.packed_formats) or 'no packed blocks')}"],
        ["weights", f"<code>{escape(model.weights_hash)}</code>"],
        ["traffic", f"{escape(deployment.traffic.name)} ({escape(deployment.traffic.source_format)}), {deployment.traffic.num_requests:,} requests, concurrency {deployment.concurrency}"],
        ["served by", f"{escape(deployment.serving.engine)} {escape(deployment.serving.version)} {escape(json.dumps(dict(deployment.serving.arguments), ensure_ascii=False))}"],
        ["hardware", f"{escape(hardware.name)} · {hardware.num_devices} {'cores' if hardware.device == 'cpu' else 'devices'} · {escape(', '.join(hardware.isa))} · last-level cache {hardware.last_level_cache_bytes / 2**20:.0f} MiB"],
        ["measured figures", escape(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in hardware.details.items())) or "-"],
        ["threads", escape(json.dumps({"threads": environment.get("threads"), **environment.get("thread_env", {})}, ensure_ascii=False))],
        ["versions", escape(json.dumps({**data.plan.versions, **environment.get("versions", {})}, ensure_ascii=False))],
        ["start-up", escape(_startup(data.state.start))],
    ]  # fmt: skip
    return "<h2>Environment</h2>" + _table(["", ""], rows)


def _startup(start: Any) -> str:
    return "; ".join(
        f"{engine}: " + ", ".join(f"{name} {value:.0f} ms" for name, value in phases.items())
        for engine, phases in start.get("startup_ms", {}).items()
    )


def _reproduce(data: ReportData) -> str:
    spec = data.plan.spec
    options = [
        f"--model {spec.model}",
        f"--traffic {spec.traffic}",
        f"--budget {spec.budget}",
        f"--seed {spec.seed}",
        f"--numerics {spec.numerics}",
    ]
    options += [f"--concurrency {spec.concurrency}"] if spec.concurrency != 1 else []
    options += [f"--engine {spec.engine}"] if spec.engine != "decoder" else []
    options += [f"--threads {spec.threads}"] if spec.threads else []
    again = f"hotpass compile {' '.join(options)}"
    lines = [again]
    if data.candidate is not None:
        lines.append(
            f"hotpass try {data.folder}/candidates/{data.candidate.id} --in {data.folder}    # this candidate alone, measured again"
        )
    lines.append(f"hotpass ui {data.folder}    # every attempt and every measured forward pass, in MLflow")
    meaning = (
        f"{_tag('measured')} a clock read it on this machine. {_tag('simulated')} the fake engine made it up; nothing ran. "
        f"{_tag('predicted')} computed from measurements of something else, as a whole step from two cuts. "
        f"Numbers on this page are {_tag(data.kind)} unless they say otherwise; floors are predicted from measured bandwidth and FLOP rates."
    )
    return f"<h2>Reproduce</h2><pre>{escape(chr(10).join(lines))}</pre><p class=legend>{meaning}</p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already. A column whose head begins with `>` holds numbers."""
    classes = ["n" if name.startswith(">") else "w" for name in head]
    heads = "".join(
        f'<th class="{kind}">{escape(name.lstrip(">"))}</th>' for kind, name in zip(classes, head, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _tag(kind: str, text: str = "") -> str:
    return f'<span class="tag {escape(kind)}">{escape(text or kind)}</span>'


def _ratio(estimate: Estimate | None) -> str:
    return (
        "-"
        if estimate is None
        else f"{estimate.value:.3f}× <span class=ci>[{estimate.low:.3f}, {estimate.high:.3f}]</span>"
    )


def _kind_of(line: str) -> str:
    return {"+": "a", "-": "d", "@": "h"}.get(line[:1], "c")
