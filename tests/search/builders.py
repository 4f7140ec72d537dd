"""Small real parts, slot tables and deployments for the tests of the search."""

from __future__ import annotations

from hotpass.records.candidate import PartSource
from hotpass.records.deployment import Deployment, HardwareRef, ModelRef, Serving, TrafficRef
from hotpass.records.measurement import Attempt, Estimate, Purpose, Tier, Verdict
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
from hotpass.records.slots import Slot, SlotTable


def part(name: str, claims: list[str], **declared: object) -> PartSource:
    """A part whose declaration is given; its code is never run."""
    arguments = "".join(f", {key}={value!r}" for key, value in declared.items())
    text = (
        "from hotpass import part\n\n"
        f"@part(engine='decoder', claims={claims!r}{arguments})\n"
        f"class Part:\n    '''{name} reads less memory.'''\n\n    def forward(self, *args):\n        return args  # {name}\n"
    )
    return PartSource(name=name, files=(("part.py", text),))


def slot_table(layers: int = 2) -> SlotTable:
    """`model`, and layers with attention and MLP below them."""
    found = [("model", "forward")]
    for i in range(layers):
        found += [
            (f"model.layers.{i}", "LlamaDecoderLayer"),
            (f"model.layers.{i}.self_attn", "LlamaAttention"),
            (f"model.layers.{i}.mlp", "LlamaMLP"),
        ]
    slots = tuple(
        Slot(name=name, stands_for=kind, signature="(x)", reference_sha256="0" * 64, lowest_tier=Tier.FAST)
        for name, kind in found
    )
    return SlotTable(engine="decoder", version="test", slots=slots)


def deployment(
    *,
    cores: int = 4,
    concurrency: int = 4,
    dtype: str = "float32",
    device: str = "cpu",
    packed_formats: tuple[str, ...] = (),
) -> Deployment:
    row = ShapeRow(
        phase=Phase.DECODE,
        num_seqs=4,
        query_tokens=4,
        context_mean=256,
        context_max=512,
        steps_share=1.0,
        tokens_share=1.0,
    )
    return Deployment(
        model=ModelRef(
            name="tiny", folder="/nowhere", architecture="LlamaForCausalLM", dtype=dtype, num_layers=2, layers=None,
            num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64, intermediate_size=128, vocab_size=256, max_context=1024,
            num_params=100_000, packed_formats=packed_formats, config_hash="c" * 64, weights_hash="w" * 64, tokenizer_hash="t" * 64,
        ),
        traffic=TrafficRef(
            name="chat", source_format="preset", content_hash="x" * 64, num_requests=10, dropped={}, content_valid=False
        ),
        hardware=HardwareRef(
            name=f"{device}:test", device=device, num_devices=cores, isa=("avx2",), last_level_cache_bytes=2**25,
            memory_bytes=2**34,
        ),
        serving=Serving(),
        concurrency=concurrency,
        shapes=ShapeTable(
            rows=(row,), concurrency=concurrency, chunk_tokens=512, num_steps=100, output_tokens_per_step=4.0
        ),
    )  # fmt: skip


def attempt(
    candidate_id: str,
    incumbent_id: str,
    speedup: float | None = None,
    *,
    verdict: Verdict | None = None,
    tier: Tier = Tier.FAST,
    spread: float = 0.02,
    reason: str = "measured",
    gates: dict[str, str] | None = None,
    purpose: Purpose = Purpose.SEARCH,
    seconds: float = 1.0,
) -> Attempt:
    """Timed when `speedup` is given, else as `verdict` says."""
    if speedup is not None and verdict is None:
        low, high = speedup * (1 - spread), speedup * (1 + spread)
        verdict = Verdict.FASTER if low > 1 else Verdict.SLOWER if high < 1 else Verdict.INCONCLUSIVE
    assert verdict is not None
    estimate = Estimate(value=speedup, low=speedup * (1 - spread), high=speedup * (1 + spread)) if speedup else None
    return Attempt(
        candidate_id=candidate_id,
        incumbent_id=incumbent_id,
        tier=tier,
        purpose=purpose,
        verdict=verdict,
        reason=reason,
        speedup=estimate if verdict.is_timed else None,
        tokens_per_second=100.0 * speedup if speedup else None,
        gates=gates or {},
        seconds=seconds,
    )
