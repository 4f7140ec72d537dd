"""transformers' own loop as a side: the same windows, the same logits, its own contexts."""

from __future__ import annotations

import pytest
import torch

from engines.decoder import side
from engines.decoder.baseline import BASELINES
from hotpass.errors import InputError


@pytest.mark.parametrize("contexts", ["tokens", "kv"])
@pytest.mark.parametrize("name", ["transformers-eager-fp32", "transformers-sdpa-fp32", "transformers-sdpa-bf16"])
def test_baselines_answer_every_row(world, name, contexts):
    world.program.install_baseline("candidate", name, 0)
    limit = 1e-5 if name.endswith("fp32") else 0.2
    for row in range(len(world.plan.rows)):
        given = world.contexts(row)
        if contexts == "kv":
            given = world.program.compute_contexts(0, row, given)
        world.program.load_contexts("candidate", 0, row, given)
        for _ in range(2):
            logits, reply = world.window("candidate", row, prepare=False)
            assert reply.failure is None
            torch.testing.assert_close(logits, world.expected(row), rtol=0, atol=limit)
    world.program.uninstall("candidate")
    logits, _ = world.window("candidate", 0)
    torch.testing.assert_close(logits, world.expected(0), rtol=0, atol=1e-5)


def test_a_compiled_baseline_compiles_as_contexts_are_loaded_and_never_in_a_window(world, traced_only):
    world.program.install_baseline("candidate", "transformers-compiled-fp32", 0)
    assert traced_only == ["LlamaForCausalLM"]
    for row in (0, 3):  # padded decode; decode and prefill in one step
        world.program.load_contexts("candidate", 0, row, world.contexts(row))
        for _ in range(2):
            logits, reply = world.window("candidate", row, prepare=False)
            assert reply.compile_events == 0
            torch.testing.assert_close(logits, world.expected(row), rtol=0, atol=1e-5)


def test_the_names_are_the_product_of_attention_and_dtype():
    assert set(BASELINES) == {
        f"transformers-{how}-{dtype}" for how in ("eager", "sdpa", "compiled") for dtype in ("fp32", "bf16")
    }


def test_an_unknown_baseline_is_refused(world):
    with pytest.raises(InputError, match="did you mean 'transformers-eager-fp32'"):
        world.program.install_baseline("candidate", "transformers-eagre-fp32", 0)


@pytest.mark.parametrize(("long_seconds", "warmed"), [(0.0, [2]), (1e9, [2, 11])])
def test_a_prompt_that_would_take_long_is_not_warmed_on_all_its_tokens(world, monkeypatch, long_seconds, warmed):
    """What a CPU has no units for takes a hundred times as long."""
    row = next(row for row, item in enumerate(world.plan.rows) if item.phase == "prefill" and item.num_seqs == 1)
    assert world.plan.row_query_lens(row) == (11,)
    monkeypatch.setattr(side, "TRIAL_TOKENS", 2)
    monkeypatch.setattr(side, "LONG_SECONDS", long_seconds)
    world.program.install_baseline("candidate", "transformers-eager-bf16", 0)
    own = world.program._side("candidate", 0).own
    seen, forward = [], own.forward
    monkeypatch.setattr(
        world.program._side("candidate", 0),
        "forward",
        lambda batch, kv: seen.append(batch.query_tokens) or forward(batch, kv),
    )
    given = world.program.compute_contexts(0, row, world.contexts(row))
    world.program.load_contexts("candidate", 0, row, given)
    assert sorted(set(seen)) == warmed
    logits, _ = world.window("candidate", row, prepare=False)
    torch.testing.assert_close(logits, world.expected(row), rtol=0, atol=0.2)
    world.program.uninstall("candidate")
