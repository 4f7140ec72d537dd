"""transformers' own loop as a side: the same windows, the same logits, its own contexts."""

from __future__ import annotations

import pytest
import torch

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
