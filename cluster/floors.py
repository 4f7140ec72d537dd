"""Physical floors of each row of a shape table: what the machine's measured bandwidth and FLOP rates allow at best.

Two kinds. The *bound* that results are shown against counts the weights as the model's file stores them (its packed blocks where
it has some), each read once a step, with the KV cache of the row, and the FLOPs at the best measured rate. The *suspect* floor,
below which a time cannot be true, counts the stream alone, at the narrowest storage that the policy allows: kernels may compute in
units that were not measured, but they cannot leave weights unread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.spec import NARROWEST_BITS
from hotpass.records.candidate import Numerics
from hotpass.records.deployment import Deployment, ModelRef
from hotpass.records.shapes import Phase, ShapeRow

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKED_FILE = "packed.safetensors"
MODULE_FILE = "module.json"


def bounds_ms(deployment: Deployment) -> dict[str, float]:
    """`ShapeRow.key` → ms; empty where the hardware's figures were not measured (the fake engine)."""
    stored = stored_bytes(deployment.model)
    return _floors(deployment, stored, with_flops=True) if stored else {}


def suspect_ms(deployment: Deployment, allowed: Numerics) -> dict[str, float]:
    """The same for rejecting impossible times."""
    stored = stored_bytes(deployment.model)
    if not stored:
        return {}
    if allowed is Numerics.LOSSY:
        stored = min(stored, deployment.model.num_params * NARROWEST_BITS / 8)
    return _floors(deployment, stored, with_flops=False)


def stored_bytes(model: ModelRef) -> float:
    """Bytes of weights that a decode step must read: as packed, else in the declared dtype; an untied embedding is looked up, not read.

    0 for the fake engine's model, which has no files.
    """
    folder = Path(model.folder)
    if model.folder and (folder / MODULE_FILE).is_file():
        return float(min(item["streamed_bytes"] for item in _examples(model)))
    if not model.folder or not (folder / "config.json").is_file():
        return 0.0
    if model.layers is None and (folder / PACKED_FILE).is_file():
        return float((folder / PACKED_FILE).stat().st_size)
    tied = bool(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False))
    read = model.num_params - (0 if tied else model.vocab_size * model.hidden_size)
    return float(read * DTYPE_BYTES[model.dtype])


def _examples(model: ModelRef) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(model.folder) / MODULE_FILE).read_text(encoding="utf-8"))["examples"]
    return found


def kv_bytes(model: ModelRef, row: ShapeRow) -> float:
    """Of the row's contexts, read once, in the declared dtype."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * DTYPE_BYTES[model.dtype]
    return float(row.num_seqs * row.context_mean * per_token)


def step_flops(model: ModelRef, row: ShapeRow) -> float:
    """Two per multiply-add: every projection for each query token, the head for the last token of each sequence, attention. Of a
    module what was counted when it was prepared."""
    if row.phase is Phase.FORWARD:
        return float(sum(item["flops"] for item in _examples(model) if item["name"] == row.name))
    head = model.vocab_size * model.hidden_size
    per_sequence = row.query_tokens / row.num_seqs
    attended = row.query_tokens * (row.context_mean + per_sequence / 2)
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * attended
    return 2.0 * (model.num_params - head) * row.query_tokens + 2.0 * head * row.num_seqs + attention


def _floors(deployment: Deployment, weight_bytes: float, *, with_flops: bool) -> dict[str, float]:
    from engines.probe import physical_floor_ms

    hardware, model = deployment.hardware, deployment.model
    precision = _best_precision(hardware.details)
    floors = {}
    for row in deployment.shapes.rows:
        floor = physical_floor_ms(
            hardware,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes(model, row),
            flops=step_flops(model, row) if with_flops and row.phase is not Phase.DECODE else 0.0,
            precision=precision,
        )
        if floor is not None:
            floors[row.key] = floor
    return floors


def _best_precision(details: object) -> str:
    rates = dict(details) if isinstance(details, dict) else {}
    fp32, bf16 = (float(rates.get(f"{name}_gflop_per_s", 0.0) or 0.0) for name in ("fp32", "bf16"))
    return "bf16" if bf16 > fp32 else "fp32"
