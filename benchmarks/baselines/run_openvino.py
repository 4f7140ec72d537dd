"""OpenVINO GenAI over the shape points; runs in its own environment. The pipeline reads a GGUF file or an OpenVINO folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.baselines.sweep import Generate, Tuning, reply, request, run_orders


def tunings(precision: str, threads: list[int]) -> Iterator[Tuning]:
    for count, kv, attention in itertools.product(
        threads, ("f32", "u8") if precision == "f32" else ("f16", "u8"), ("SDPA", "PA")
    ):
        yield {
            "INFERENCE_NUM_THREADS": count,
            "KV_CACHE_PRECISION": kv,
            "ATTENTION_BACKEND": attention,
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
        }


def set_up(model: str, tuning: Tuning) -> Generate:
    """One pipeline at a time: the one before it is released first."""
    pipeline: Any = openvino_genai.LLMPipeline(model, "CPU", **tuning)

    def generate(tokens: list[list[int]], new_tokens: int) -> None:
        ids = np.asarray(tokens, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        made = pipeline.generate(inputs, config)
        lengths = {len(sequence) for sequence in made.tokens}
        if lengths != {new_tokens}:
            raise RuntimeError(f"asked for {new_tokens} tokens, got {lengths}")

    return generate


def logits(folder: Path, tokens: list[int], threads: int, precision: str) -> np.ndarray:
    """float32 [len(tokens), vocab] of the model that the pipeline made of the file, run by the plain runtime."""
    core = openvino.Core()
    xml = next(path for path in sorted(folder.glob("*.xml")) if "token" not in path.name)
    config = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    run = core.compile_model(core.read_model(xml), "CPU", config).create_infer_request()
    ids = np.asarray([tokens], dtype=np.int64)
    given = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }
    names = {name for port in run.model_inputs for name in port.names}
    run.infer({name: value for name, value in given.items() if name in names})
    found: np.ndarray = run.get_tensor("logits").data[0]
    return found


def main() -> None:
    orders = request()
    model, precision = orders["model"], orders["precision"]
    run_orders(orders, list(tunings(precision, orders["threads"])), lambda tuning: set_up(model, tuning))
    facts: dict[str, Any] = {}
    try:
        openvino_genai.LLMPipeline(model, "CPU", enable_save_ov_model=True, INFERENCE_NUM_THREADS=1)
        np.save(orders["logits"], logits(Path(model).parent, orders["tokens"], max(orders["threads"]), precision))
    except Exception as error:  # whatever the runtime says: the figure is left out with the reason
        facts["no_logits"] = f"{type(error).__name__}: {error}"[:300]
    reply(**facts)


if __name__ == "__main__":
    main()
