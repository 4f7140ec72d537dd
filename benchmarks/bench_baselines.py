"""External engines on this machine, over the shape points that hotpass is compared at: `make bench-baselines`.

    python -m benchmarks.bench_baselines [--engine llama.cpp] [--variant gguf] [--no-install] [--again] [--repeats 5]

Every engine gets an environment of its own (`.venv-baselines`), the same tokens, the same way of timing, and a sweep of what it
can be tuned by. Results are cached by versions, hardware and model, so that the comparison (`bench_decode`) can show them; what is
missing is named with the reason. Prints a table on stderr and, last on stdout, one JSON line. Nothing else may run meanwhile.

What is not here: pairing with hotpass. These numbers stand beside it, from the same machine but not from the same minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actors.lease import MeasuringLease
from benchmarks.baselines.engines import VARIANTS, Effort, Measured, Models, Variant, reference_logits
from benchmarks.baselines.installs import Absent
from benchmarks.baselines.sweep import POINTS, say
from engines.prepare import load_tokenizer, prepare_model
from engines.prepare.cache import cache_root
from engines.prepare.sources import locate
from engines.probe import probe_hardware
from engines.threading_env import usable_cores
from hotpass.canonical import content_hash
from hotpass.records.deployment import HardwareRef
from hotpass.traffic.text import TextSource

BENCH_VERSION = 1
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
    results = [
        _result(variant, models, effort, hardware, install=options.install, again=options.again) for variant in chosen
    ]
    _print_table(results)
    print(
        json.dumps(
            {"schema": 1, "bench": "baselines", "hardware": hardware.name, "points": _points(), "results": results}
        )
    )


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
        with MeasuringLease("cpu"):
            measured = variant.run(models, effort)
        result = {**about, **_figures(variant, measured, models), "seconds": round(time.monotonic() - start, 1)}
    except Absent as error:
        say(f"{variant.engine} {variant.name}: {error}")
        return {**about, "missing": str(error)}
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_suffix(f".{os.getpid()}")
    making.write_text(json.dumps(result, indent=1))
    making.replace(path)
    return {**result, "cached": False}


def _figures(variant: Variant, measured: Measured, models: Models) -> Result:
    """Speeds by point, and how far the logits are from the reference."""
    speeds = {
        row.point: {
            "tokens_per_s": round(statistics.median(row.tokens_per_s), 2),
            "min": round(min(row.tokens_per_s), 2),
            "max": round(max(row.tokens_per_s), 2),
            "repeats": len(row.tokens_per_s),
            "tuning": row.tuning,
            "tunings_tried": len(row.swept),
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
    return parser


if __name__ == "__main__":
    main()
