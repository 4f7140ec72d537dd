"""Captured decode rows, with a capture that runs on a CPU: it repeats the step with what was frozen, into the same memory."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from engines.decoder.graphs import addresses, capture_rows
from engines.program import CandidateFailed
from hotpass.records.measurement import FailureKind

DECODE_ROWS = (0, 1, 5)


def frozen(step):
    """As a CUDA graph: tensors are read anew at each replay, Python values are those of the capture."""
    logits = step().clone()
    return lambda: logits.copy_(step()), logits


@pytest.fixture
def side(world):
    undo = ExitStack()
    yield world.program._loaded("candidate", 0), undo
    undo.close()


def test_replays_give_the_logits_of_every_step(world, side):
    target, undo = side
    capture_rows(target, undo, frozen)
    calls = []
    forward, target.forward = target.forward, lambda *args: calls.append(1) or forward(*args)
    for row in DECODE_ROWS:
        logits, reply = world.window("candidate", row)
        assert reply.failure is None
        torch.testing.assert_close(logits, world.expected(row), rtol=0, atol=1e-5)
    target.forward = forward
    assert len(calls) == sum(world.plan.steps_per_window[row] for row in DECODE_ROWS)  # only inside the toy's replays
    logits, _ = world.window("candidate", 2)
    torch.testing.assert_close(logits, world.expected(2), rtol=0, atol=1e-5)
    undo.close()
    assert target.graphs is None
    assert not target.step.device_lengths


def test_parts_are_counted_by_their_calls_in_the_captured_step(world):
    world.install(world.program.part_template("model.layers.0.mlp"))
    target = world.program._loaded("candidate", 0)

    def silent(step):
        logits = step().clone()
        counts = target.installed.counts
        before = dict(counts)

        def replay():
            saved = dict(counts)
            logits.copy_(step())
            counts.update(saved)  # a real replay runs no Python

        assert before["model.layers.0.mlp"] == 1
        return replay, logits

    capture_rows(target, target.installed.undo, silent)
    _, reply = world.window("candidate", 0)
    assert set(reply.activation.values()) == {4}


def test_a_step_that_froze_its_context_is_refused(world, side):
    target, undo = side
    world.prepare_row("candidate", 0)

    def host_lengths(step):
        target.step.device_lengths = False
        return frozen(step)

    with pytest.raises(CandidateFailed, match="other logits") as caught:
        capture_rows(target, undo, host_lengths)
    assert caught.value.failure.kind == FailureKind.INSTALL


def counting(capture, captured):
    def counted(step):
        captured.append(1)
        return capture(step)

    return counted


def test_memory_that_moved_is_captured_again_and_the_window_does_not_count(world):
    world.install(world.program.part_template("model.norm"))
    target, captured = world.program._loaded("candidate", 0), []
    capture_rows(target, target.installed.undo, counting(frozen, captured))
    assert len(captured) == len(DECODE_ROWS)
    weight = target.net.modules["model.norm"].weight
    held, weight.data = weight.data, weight.data.clone()
    _, reply = world.window("candidate", 0)
    assert reply.failure is None
    assert reply.compile_events == len(DECODE_ROWS)
    assert len(captured) == 2 * len(DECODE_ROWS)
    again, reply = world.window("candidate", 0)
    assert reply.compile_events == 0
    torch.testing.assert_close(again, world.expected(0), rtol=0, atol=1e-5)
    weight.data = held


def test_a_replay_after_memory_moved_would_have_read_what_was_there(world, side):
    """What the comparison of addresses is for: without it the stale graph answers from the old place."""
    target, undo = side
    module = target.net.modules["model.norm"]
    captured = []

    def bound(step):
        """A CUDA graph has addresses; this one has the memory of the first capture."""
        old = captured[0] if not captured[1:] else torch.nn.Parameter(weight.data.clone(), requires_grad=False)
        logits = step().clone()

        def replay():
            kept, module._parameters["weight"] = module._parameters["weight"], old
            logits.copy_(step())
            module._parameters["weight"] = kept

        return replay, logits

    weight = module.weight
    captured.append(torch.nn.Parameter(weight.data.clone(), requires_grad=False))
    capture_rows(target, undo, bound)
    captured.append("later captures have the memory of their time")
    held, weight.data = weight.data, 2 * weight.data
    target.graphs._addresses = addresses(target)  # a comparison that sees nothing
    stale, _ = world.window("candidate", 0)
    target.graphs._addresses = ()
    renewed, reply = world.window("candidate", 0)
    weight.data = held
    torch.testing.assert_close(stale, world.expected(0), rtol=0, atol=1e-5)
    assert reply.compile_events == len(DECODE_ROWS)
    torch.testing.assert_close(renewed, 2 * world.expected(0), rtol=1e-4, atol=1e-4)


def test_memory_that_moves_before_every_window_never_counts(world):
    target = world.program._loaded("candidate", 0)
    undo = ExitStack()
    capture_rows(target, undo, frozen)
    weight = target.net.modules["model.norm"].weight
    held, kept = weight.data, []
    for _ in range(3):
        kept.append(weight.data.clone())  # kept, so that no address comes twice
        weight.data = kept[-1]
        assert world.window("candidate", 0)[1].compile_events == len(DECODE_ROWS)
    weight.data = held
    undo.close()


def test_other_slots_and_longer_contexts_run_eagerly(world, side):
    target, undo = side
    capture_rows(target, undo, frozen)
    batch = target.row_batch(0, world.plan.steps_per_window[0] - 1, torch.zeros(3, dtype=torch.int64))
    with torch.inference_mode():
        assert target.graphs(batch) is not None
    beyond = target.row_batch(0, world.plan.steps_per_window[0], torch.zeros(3, dtype=torch.int64))
    assert target.graphs(beyond) is None
    assert target.graphs(target.row_batch(2, 0, torch.zeros(9, dtype=torch.int64))) is None
