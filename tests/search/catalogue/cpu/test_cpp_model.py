"""The C++ forward against transformers: every storage, instruction set and kind of step; threads; what it refuses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.build import find_compiler
from engines.decoder.source import compile_part
from hotpass.parts import declaration
from hotpass.records.candidate import Numerics
from search.catalogue import find_part
from tests.search.catalogue.cpu.harness import ISAS, Whole, config, every_logit, library, model, text

if find_compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

BLOCKS = {
    "q_proj": "Q4_1", "k_proj": "Q4_0", "v_proj": "Q5_0", "o_proj": "Q4_1", "gate_proj": "Q4_1", "up_proj": "Q8_0", "lm_head": "Q8_0",
    "embed_tokens": "Q4_1",
}  # fmt: skip
"""Mixed on purpose, `down_proj` not packed: neighbours in one product have different formats."""

EXACT = 2e-5
"""Largest difference of a logit (standard deviation near 1): float32 in another order. Measured: 4e-6."""

Natives = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def natives(tmp_path_factory: pytest.TempPathFactory) -> Natives:
    folder, source = tmp_path_factory.mktemp("native"), find_part("cpp-model")
    made: dict[str, dict[str, Any]] = {}

    def get(isa: str) -> dict[str, Any]:
        if isa not in made:
            made[isa] = library(source, folder, isa)
        return made[isa]

    return get


def walk(part: Whole, net: Any, vocab: int) -> float:
    """The largest error over steps of every kind: prompts, ragged and chunked; decode, alone and ragged; mixtures."""
    a, b, c = (text(length, vocab, seed) for seed, length in enumerate((60, 90, 33)))
    la, lb, lc = (every_logit(net, item) for item in (a, b, c))
    errors = []

    def step(tokens: list[list[int]], contexts: list[int], slots: list[int], wanted: list[torch.Tensor]) -> None:
        errors.append(float((part(tokens, contexts, slots) - torch.stack(wanted)).abs().max()))

    step([a[:19]], [0], [2], [la[18]])
    step([a[19:20]], [19], [2], [la[19]])
    step([b[:3], c[:20]], [0, 0], [1, 3], [lb[2], lc[19]])
    step([a[20:21], b[3:40]], [20, 3], [2, 1], [la[20], lb[39]])
    step([c[20:21], a[21:22], b[40:41]], [20, 21, 40], [3, 2, 1], [lc[20], la[21], lb[40]])
    step([b[41:46]], [41], [1], [lb[45]])
    step([a[22:24], c[21:24], b[46:49]], [22, 21, 46], [2, 3, 1], [la[23], lc[23], lb[48]])
    step([b[49:]], [49], [1], [lb[-1]])
    step([b, a, c], [0, 0, 0], [0, 1, 2], [lb[-1], la[-1], lc[-1]])
    return max(errors)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights_as", ["fp32", "bf16", "gguf", "int8"])
def test_every_step_agrees_with_the_reference(weights_as: str, isa: str, natives: Natives) -> None:
    made = config()
    store, net = model(made, blocks=BLOCKS if weights_as == "gguf" else None, rounded=weights_as == "bf16")
    if weights_as == "int8":  # a model of 8-bit blocks, so that rounding to 8 bits changes (nearly) nothing
        every = dict.fromkeys((*BLOCKS, "down_proj"), "Q8_0")
        store, net = model(made, blocks=every)
    part = Whole(natives(isa), store, made, weights_as)
    error = walk(part, net, made.vocab_size)
    part.close()
    assert error < (EXACT if weights_as != "int8" else 2e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights_as", ["gguf-a8", "int8-a8"])
def test_activations_of_8_bits_are_close_and_are_not_exact(weights_as: str, isa: str, natives: Natives) -> None:
    made = config()
    store, net = model(
        made, blocks=dict.fromkeys((*BLOCKS, "down_proj"), "Q4_1" if weights_as == "gguf-a8" else "Q8_0")
    )
    part = Whole(natives(isa), store, made, weights_as)
    error = walk(part, net, made.vocab_size)
    part.close()
    assert 1e-3 < error < 0.15


def test_shapes_of_other_models(natives: Natives) -> None:
    """head_dim 64 and 128, one query head or four for a KV head, tied head: what a wrong stride would show in."""
    for changes in (
        {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
        {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1},
        {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "vocab_size": 64},
    ):
        made = config(**changes)
        store, net = model(made, blocks=BLOCKS, seed=3)
        for weights_as, limit in (("fp32", EXACT), ("gguf", EXACT), ("gguf-a8", 0.15)):
            part = Whole(natives("native"), store, made, weights_as)
            error = walk(part, net, made.vocab_size)
            part.close()
            assert error < limit, (changes, weights_as)


@pytest.mark.parametrize("weights_as", ["gguf", "fp32"])
def test_prompts_at_the_borders_of_the_matrix_unit(weights_as: str, natives: Natives) -> None:
    """Tiles of 16 rows in pairs, 48 to 64 (token, head) pairs, steps of 64 positions: one less, as many, one more; with and without
    a context. Ten heads of 32 dimensions, five for a KV head; the first token of each prompt is the last of a step before."""
    made = config(hidden_size=160, head_dim=32, num_attention_heads=10, num_key_value_heads=2)
    store, net = model(made, blocks=BLOCKS if weights_as == "gguf" else None, seed=5)
    part = Whole(natives("native"), store, made, weights_as)
    tokens = text(190, made.vocab_size, 6)
    wanted = every_logit(net, tokens)
    for context in (0, 1, 62, 64, 130):
        if context:
            part([tokens[:context]], [0], [0])
        for count in (1, 8, 9, 10, 15, 16, 17, 31, 32, 33, 48, 49):
            error = float(
                (part([tokens[context : context + count]], [context], [0])[0] - wanted[context + count - 1]).abs().max()
            )
            assert error < EXACT, (context, count)
    part.close()


def test_prompts_of_many_rows_and_columns(natives: Natives) -> None:
    """More row tiles than go through the weights at once (384 blocks of 16 rows and 32 columns), an odd number of them."""
    made = config(hidden_size=64, intermediate_size=1088, vocab_size=64, num_attention_heads=2, head_dim=32)
    store, net = model(made, blocks=dict.fromkeys((*BLOCKS, "down_proj"), "Q4_1"), seed=7)
    part = Whole(natives("native"), store, made, "gguf")
    a, b, c = (text(length, made.vocab_size, length) for length in (100, 113, 45))
    found = part([a, b, c], [0, 0, 0], [0, 1, 2])
    part.close()
    for tokens, logits in zip((a, b, c), found, strict=True):
        assert (logits - every_logit(net, tokens)[-1]).abs().max() < EXACT


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)  # fmt: skip
def test_scaled_rotary_embeddings(rope: dict[str, Any], natives: Natives) -> None:
    made = config(rope_parameters=rope)
    store, net = model(made)
    part = Whole(natives("native"), store, made, "fp32")
    error = walk(part, net, made.vocab_size)
    part.close()
    assert error < EXACT


def test_a_cache_of_bfloat16_rounds_keys_and_values_alone(natives: Natives) -> None:
    made = config()
    store, net = model(made)
    exact, rounded = (
        Whole(natives("native"), store, made, "fp32", kv_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert 1e-4 < walk(rounded, net, made.vocab_size) < 0.05
    tokens = text(30, made.vocab_size, 9)
    for part in (exact, rounded):
        part([tokens], [0], [0])
    assert torch.equal(exact.kv.keys(0)[0, :, :30].bfloat16(), rounded.kv.keys(0)[0, :, :30])
    assert torch.equal(exact.kv.values(0)[0, :, :30].bfloat16(), rounded.kv.values(0)[0, :, :30])
    for part in (exact, rounded):
        part.close()


@pytest.mark.parametrize("isa", ISAS)
def test_threads_share_the_work_and_results_repeat(isa: str, natives: Natives) -> None:
    made = config()
    store, net = model(made, blocks=BLOCKS)
    tokens = [text(length, made.vocab_size, length) for length in (100, 37)]
    wanted = torch.stack([every_logit(net, item)[-1] for item in tokens])
    for threads in (1, 2, 3, 5, 9):  # 9: more threads than some products have tiles
        part = Whole(natives(isa), store, made, "gguf", threads=threads)
        contexts = [len(item) - 1 for item in tokens]
        prompts = part([item[:-1] for item in tokens], [0, 0], [0, 1])
        first = part([item[-1:] for item in tokens], contexts, [0, 1])
        for _ in range(5):
            assert torch.equal(part([item[-1:] for item in tokens], contexts, [0, 1]), first)
        assert torch.equal(part([item[:-1] for item in tokens], [0, 0], [0, 1]), prompts)
        part.close()
        assert (first - wanted).abs().max() < EXACT


def test_threads_sleep_between_steps_and_end_with_the_part(natives: Natives) -> None:
    made = config()
    store, _ = model(made)
    before = os.listdir("/proc/self/task") if Path("/proc/self/task").exists() else []
    part = Whole(natives("native"), store, made, "fp32", threads=3)
    part([[1, 2, 3]], [0], [0])
    if before:
        workers = set(os.listdir("/proc/self/task")) - set(before)
        assert len(workers) == 2
        used = [_processor_ticks(worker) for worker in workers]
        threading.Event().wait(0.15)
        assert [_processor_ticks(worker) for worker in workers] == used, "a worker ran while there was no step"
    part.close()
    part.close()
    if before:
        assert not workers & set(os.listdir("/proc/self/task"))


def _processor_ticks(task: str) -> int:
    """User and system time of a thread of this process, in clock ticks of 10 ms."""
    fields = Path(f"/proc/self/task/{task}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "SiLU"),
        ({"head_dim": 24}, "multiples of 16"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_models_that_it_cannot_run_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    made = config(**changes)
    store, _ = model(config())
    with pytest.raises(ValueError, match=message):
        Whole({}, store, made, "fp32")


def test_blocks_are_asked_of_a_model_that_has_none() -> None:
    store, _ = model(config())
    with pytest.raises(ValueError, match="no packed blocks"):
        Whole({}, store, config(), "gguf")


def test_packed_sizes_are_those_of_the_file() -> None:
    """What is streamed is what the blocks take: 20 bytes for 32 values of Q4_1, 34 of Q8_0."""
    made = config(hidden_size=128, intermediate_size=256, vocab_size=256, num_attention_heads=8)
    store, _ = model(made, blocks=dict.fromkeys((*BLOCKS, "down_proj"), "Q4_1"))

    source = find_part("cpp-model")
    part = compile_part(declaration(source).bind(source, {"weights_as": "gguf"}))
    packed = part.cls().weights(store, {"weights_as": "gguf"})
    part.forget()
    assert packed["matrices"].numel() == sum(
        rows.numel() for _, rows in (store.packed(name) for name in store.packed_names())
    )


def test_numerics_class_follows_storage_and_model() -> None:
    declared = declaration(find_part("cpp-model"))
    expected = {
        ("fp32", "float32"): Numerics.TOLERANCE, ("fp32", "bfloat16"): Numerics.TOLERANCE, ("bf16", "bfloat16"): Numerics.TOLERANCE,
        ("bf16", "float32"): Numerics.LOSSY, ("bf16", "float16"): Numerics.LOSSY, ("gguf", "float32"): Numerics.TOLERANCE,
        ("bf16-a16", "bfloat16"): Numerics.TOLERANCE, ("bf16-a16", "float32"): Numerics.LOSSY,
        ("gguf-a8", "float32"): Numerics.LOSSY, ("int8", "bfloat16"): Numerics.LOSSY, ("int8-a8", "float32"): Numerics.LOSSY,
    }  # fmt: skip
    for (weights_as, dtype), kind in expected.items():
        assert declared.numerics_of({"weights_as": weights_as}, dtype) is kind
