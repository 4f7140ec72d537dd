"""The ragged reference against transformers' own forward, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from engines.decoder import fingerprint
from engines.decoder.batch import build_batch, phase_of
from engines.decoder.kv import KvPool

PLAIN = ("llama", "llama-untied", "llama3-rope", "mistral", "qwen2", "qwen3", "gpt2")


@pytest.mark.parametrize("family", PLAIN)
def test_ragged_windows_equal_each_sequence_alone(make_world, family):
    world = make_world(family)
    assert "ragged" in world.program.slots().version
    for row in range(len(world.plan.rows)):
        logits, reply = world.window("incumbent", row)
        assert reply.failure is None
        assert reply.steps == world.plan.steps_per_window[row]
        torch.testing.assert_close(logits, world.expected(row), rtol=0, atol=1e-5)


def test_windowed_models_run_with_their_own_cache_and_say_so(make_world):
    world = make_world("gemma3")
    assert "one request per cache" in world.program.slots().version
    assert "sliding_attention" in world.program.slots().version
    for row in range(len(world.plan.rows)):
        for fresh in (True, False):  # the second time from the cache as the first window left it
            logits, reply = world.window("incumbent", row, prepare=fresh)
            assert reply.failure is None
            torch.testing.assert_close(logits, world.expected(row), rtol=0, atol=1e-5)


def test_a_window_can_be_repeated_and_other_tokens_give_other_logits(world):
    first, _ = world.window("incumbent", 0)
    again, _ = world.window("incumbent", 0, prepare=False)
    other, _ = world.window("incumbent", 0, prepare=False, seed=6)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_cut_is_the_model_of_those_layers(world):
    logits, _ = world.window("incumbent", 0, cut=1)
    layers = world.truth.model.layers
    whole = list(layers)
    world.truth.model.layers = torch.nn.ModuleList([whole[0], whole[2]])
    world.truth.config.num_hidden_layers = 2
    try:
        expected = world.expected(0)
    finally:
        world.truth.model.layers, world.truth.config.num_hidden_layers = layers, 3
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_unused_positions_are_never_read(world):
    side = world.program._loaded("incumbent", 0)
    side.kv.poison(range(side.kv.num_slots))
    for row in range(len(world.plan.rows)):
        logits, _ = world.window("incumbent", row)
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits, world.expected(row), rtol=0, atol=1e-5)


def test_lengths_from_the_device_give_the_same_as_lengths_from_the_host(world):
    side = world.program._loaded("incumbent", 0)
    side.kv.poison(range(side.kv.num_slots))
    for row in (0, 1, 5):
        expected, _ = world.window("incumbent", row)
        side.step.device_lengths = True
        try:
            logits, _ = world.window("incumbent", row)
        finally:
            side.step.device_lengths = False
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_a_bf16_model_computes_in_bf16_and_its_reference_in_fp32(make_world):
    world = make_world("llama", dtype="bfloat16")
    expected = world.expected(0)
    loaded, _ = world.window("incumbent", 0)
    reference, _ = world.window("reference", 0)
    torch.testing.assert_close(reference, expected, rtol=0, atol=1e-5)
    worst = (loaded - expected).abs().max()
    assert 1e-4 < worst < 0.2
    assert world.program._loaded("incumbent", 0).kv.dtype == torch.bfloat16


def test_sides_share_weights_and_nothing_is_copied(world):
    sides = [world.program._loaded(name, cut) for name in ("incumbent", "candidate") for cut in (0, 1)]
    owned = world.store["model.layers.2.mlp.up_proj.weight"].data_ptr()
    assert {
        side.net.modules[f"model.layers.{n}.mlp.up_proj"].weight.data_ptr()
        for side, n in zip(sides, (2, 1, 2, 1), strict=True)
    } == {owned}
    for side in sides:
        assert side.net.model.lm_head.weight.data_ptr() == world.store["model.embed_tokens.weight"].data_ptr()


def test_own_contexts_from_tokens_equal_contexts_from_the_reference(world):
    logits, _ = world.window("incumbent", 0)
    world.program.load_contexts("incumbent", 0, 0, world.contexts(0))
    again, _ = world.window("incumbent", 0, prepare=False)
    torch.testing.assert_close(again, logits, rtol=0, atol=1e-5)


def test_contexts_come_as_fp32_of_each_length(world):
    kv = world.program.compute_contexts(1, 0, world.contexts(0))
    assert [tuple(each.shape) for each in kv] == [(2, 2, 2, n, 8) for n in world.plan.row_contexts(0)]
    assert world.plan.row_contexts(0) == (20, 12, 4)


@pytest.mark.parametrize(
    ("contexts", "lens", "phase"),
    [((3, 1), (1, 1), "decode"), ((0, 0), (4, 1), "prefill"), ((8,), (5,), "prefill"), ((3, 0), (1, 6), "mixed")],
)
def test_phase_is_decided_by_sequences(contexts, lens, phase):
    assert phase_of(contexts, lens) == phase


def test_a_batch_knows_where_its_tokens_are():
    batch = build_batch(torch.arange(6), contexts=(4, 0), query_lens=(1, 5), slots=(7, 2))
    assert batch.positions.tolist() == [4, 0, 1, 2, 3, 4]
    assert batch.seq_starts.tolist() == [0, 1, 6]
    assert (batch.phase, batch.num_seqs, batch.query_tokens, batch.context) == ("mixed", 2, 6, 4)
    with pytest.raises(ValueError, match="queries"):
        build_batch(torch.arange(5), contexts=(4, 0), query_lens=(1, 5), slots=(7, 2))


def test_a_pool_takes_memory_as_it_is_written():
    def resident():
        return fingerprint.resident_bytes()

    before = resident()
    pool = KvPool(
        num_layers=4,
        num_slots=64,
        kv_heads=2,
        max_context=4096,
        head_dim=32,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert resident() - before < 16 << 20  # of 256 MiB
    context = torch.randn(4, 2, 2, 10, 32)
    pool.write(3, context)
    assert torch.equal(pool.read(3, 10), context.bfloat16().float())
    assert pool.keys(0).data_ptr() % 64 == 0
    assert not pool.values(2)[2].any()
