"""External engines on this machine, over the shape points that hotpass is compared at: `make bench-baselines`.

    python -m benchmarks.bench_baselines [--engine llama.cpp] [--variant gguf] [--no-install] [--again] [--repeats 5]
        [--sweep-seconds 240] [--budget-seconds 7200]

Every engine gets an environment of its own (`.venv-baselines`), the same tokens, the same way of timing, and a sweep of what it
can be tuned by. At the best tuning, each repeat is followed by one of hotpass's part at the same point (`baselines.beside`), which
makes the ratios paired. Results are cached by versions, hardware and model, so that `bench_decode` can hold the goals against them; what is
missing is named with the reason. Prints a table on stderr and, last on stdout, one JSON line; a run that is interrupted or out of budget
prints what it has. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actors.lease import MeasuringLease
from benchmarks.baselines.beside import STORAGES, Beside, beside
from benchmarks.baselines.engines import VARIANTS, Effort, Models, Variant, reference_logits
from benchmarks.baselines.installs import Absent
from benchmarks.baselines.processes import Measured
from benchmarks.baselines.sweep import POINTS, say
from engines.prepare import load_tokenizer, prepare_model
from engines.prepare.cache import cache_root
from engines.prepare.sources import locate
from engines.probe import probe_hardware
from engines.threading_env import usable_cores
from hotpass.canonical import content_hash
from hotpass.records.deployment import HardwareRef, ModelRef
from hotpass.traffic.text import TextSource

BENCH_VERSION = 2
"""Of how things are measured; a change measures everything again."""
MODEL, MODEL_BF16 = "smollm2-135m", "smollm2-135m-bf16"
LOGIT_TOKENS = 64

Result = dict[str, Any]


def main() -> None:
    options = _arguments().parse_args()
    hardware = probe_hardware("cpu", measure=False)
    models = _models()
    effort = Effort(threads=_thread_counts(), repeats=options.repeats, sweep_seconds=options.sweep_seconds)
    chosen = [
        variant
        for variant in VARIANTS
        if (not options.engine or variant.engine in options.engine)
        and (not options.variant or variant.name in options.variant)
    ]
    results: list[Result] = []
    signal.signal(signal.SIGTERM, _interrupt)
    end, cut = time.monotonic() + options.budget_seconds, ""
    try:
        for variant in chosen:
            if time.monotonic() > end:
                cut = f"{options.budget_seconds:.0f} s are spent"
                break
            results.append(_result(variant, models, effort, hardware, install=options.install, again=options.again))
    except KeyboardInterrupt:
        cut = "interrupted"
    done = {(result["engine"], result["variant"]) for result in results}
    left = [f"{variant.engine} {variant.name}" for variant in chosen if (variant.engine, variant.name) not in done]
    _print_table(results)
    line = {"schema": 1, "bench": "baselines", "hardware": hardware.name, "points": _points(), "results": results}
    print(json.dumps({**line, "cut": cut, "not_measured": left}))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def cached_results(hardware: HardwareRef) -> list[Result]:
    """Everything measured before on this hardware, the newest of each variant: for other benchmarks to show."""
    newest: dict[tuple[str, str], Result] = {}
    for path in sorted((cache_root() / "baselines").glob("*.json"), key=lambda path: path.stat().st_mtime):
        result = json.loads(path.read_text())
        if result["hardware_id"] == hardware.id:
            newest[result["engine"], result["variant"]] = result
    return list(newest.values())


def _result(
    variant: Variant, models: Models, effort: Effort, hardware: HardwareRef, *, install: bool, again: bool
) -> Result:
    """A variant's result, measured unless it is cached; with `missing` where there is none."""
    about: Result = {
        "engine": variant.engine,
        "variant": variant.name,
        "model": MODEL_BF16 if variant.model == "bf16" else MODEL,
        "weights": variant.weights,
        "baseline": variant.is_baseline,
        "notes": variant.notes,
        "hardware_id": hardware.id,
    }
    try:
        versions = dict(variant.versions(install))
        about["versions"] = versions
        key = content_hash([BENCH_VERSION, about, getattr(models, variant.model).weights_hash])[:32]
        path = cache_root() / "baselines" / f"{key}.json"
        if path.exists() and not again:
            return {**json.loads(path.read_text()), "cached": True}
        say(f"measuring {variant.engine} {variant.name}")
        start = time.monotonic()
        model: ModelRef = getattr(models, variant.model)
        with MeasuringLease("cpu"), beside(model, variant.model, usable_cores()) as hotpass:
            measured = variant.run(models, dataclasses.replace(effort, turn=hotpass.turn))
        figures = _figures(variant, measured, models, hotpass)
        result = {**about, **figures, "seconds": round(time.monotonic() - start, 1)}
        if measured.cut:
            say(f"{variant.engine} {variant.name}: cut, {measured.cut}")
            return {**result, "cut": measured.cut, "cached": False}
    except Absent as error:
        say(f"{variant.engine} {variant.name}: {error}")
        return {**about, "missing": str(error)}
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_suffix(f".{os.getpid()}")
    making.write_text(json.dumps(result, indent=1))
    making.replace(path)
    return {**result, "cached": False}


def _figures(variant: Variant, measured: Measured, models: Models, hotpass: Beside) -> Result:
    """Speeds by point, hotpass's over them in turns, and how far the logits are from the reference."""
    speeds = {
        row.point: {
            "tokens_per_s": round(statistics.median(row.tokens_per_s), 2),
            "min": round(min(row.tokens_per_s), 2),
            "max": round(max(row.tokens_per_s), 2),
            "repeats": len(row.tokens_per_s),
            "tuning": row.tuning,
            "tunings_tried": len(row.swept),
            "hotpass_over_it": hotpass.ratios(row),
        }
        for row in measured.rows
    }
    accuracy: Result = {"max_abs_logit_diff": None, "accuracy_note": measured.no_logits}
    if measured.logits is not None:
        reference = _reference(variant, models)
        accuracy = {
            "max_abs_logit_diff": _largest_difference(measured, reference),
            "accuracy_note": measured.logits_are,
        }
    return {"source": "measured", "points": speeds, **accuracy}


def _largest_difference(measured: Measured, reference: np.ndarray) -> float:
    assert measured.logits is not None
    if measured.logits_are == "log-probabilities":
        reference = _log_softmax(reference[: len(measured.logits)])
    width = min(measured.logits.shape[1], reference.shape[1])  # engines may pad the vocabulary
    return float(np.abs(measured.logits[:, :width] - reference[:, :width]).max())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted: np.ndarray = logits - logits.max(axis=-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def _reference(variant: Variant, models: Models) -> np.ndarray:
    """Logits of the variant's own model computed in float32, kept on disk."""
    model = getattr(models, variant.model)
    path = models.folder / f"reference-{content_hash([model.weights_hash, models.tokens])[:16]}.npy"
    if not path.exists():
        np.save(path, reference_logits(model, models, usable_cores()))
    found: np.ndarray = np.load(path)
    return found


def _models() -> Models:
    folder = cache_root() / "baselines" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    full = prepare_model(MODEL, progress=say)
    tokens = TextSource(load_tokenizer(full).encode, seed=0).draw(LOGIT_TOKENS)
    return Models(
        gguf=locate(MODEL, cache_root(), say).path,
        full=full,
        bf16=prepare_model(MODEL_BF16, progress=say),
        tokens=tuple(int(token) for token in tokens),
        folder=folder,
    )


def _thread_counts() -> tuple[int, ...]:
    """Physical cores, then half of them (decoding is bound by memory, which fewer threads may already saturate)."""
    cores = usable_cores()
    return tuple(dict.fromkeys([cores, max(1, cores // 2)]))


def _points() -> list[Mapping[str, Any]]:
    return [{"name": point.name, "num_seqs": point.num_seqs, "context": point.context} for point in POINTS]


def _print_table(results: Sequence[Result]) -> None:
    """Tokens per second, the median of the repeats; the largest logit difference to the fp32 reference."""
    say(f"{'engine':<14}{'variant':<15}" + "".join(f"{point.name:>13}" for point in POINTS) + f"{'logit diff':>12}")
    for result in results:
        head = f"{result['engine']:<14}{result['variant']:<15}"
        if "missing" in result:
            say(f"{head}  missing: {result['missing']}")
            continue
        cells = [result["points"].get(point.name, {}).get("tokens_per_s") for point in POINTS]
        difference = result["max_abs_logit_diff"]
        shown = "-" if difference is None else f"{difference:.2g}"
        say(head + "".join(f"{'-' if cell is None else f'{cell:.1f}':>13}" for cell in cells) + f"{shown:>12}")
        for name in STORAGES["bf16" if result["model"] == MODEL_BF16 else "full"]:
            ratios = [result["points"].get(point.name, {}).get("hotpass_over_it", {}).get(name) for point in POINTS]
            shares = (f"{ratio['median']:.2f} x" if ratio else "-" for ratio in ratios)
            say(f"{f'  hotpass {name}, in turns':<29}" + "".join(f"{share:>13}" for share in shares))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_baselines", description=(__doc__ or "").splitlines()[0]
    )
    engines = sorted({variant.engine for variant in VARIANTS})
    parser.add_argument("--engine", action="append", choices=engines, help="only this engine (repeatable)")
    names = sorted({variant.name for variant in VARIANTS})
    parser.add_argument("--variant", action="append", choices=names, help="only this variant (repeatable)")
    parser.add_argument("--no-install", dest="install", action="store_false", help="use only what is installed")
    parser.add_argument("--again", action="store_true", help="measure even what is cached")
    parser.add_argument("--repeats", type=int, default=5, help="of the best tuning (default 5)")
    parser.add_argument("--sweep-seconds", type=float, default=240, help="no new tuning is begun after this long")
    parser.add_argument("--budget-seconds", type=float, default=7200, help="no new variant is begun after this long")
    return parser


if __name__ == "__main__":
    main()
