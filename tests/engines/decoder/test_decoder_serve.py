"""The serving loop: the same tokens however requests are batched, chunked or reused slots poisoned."""

from __future__ import annotations

import pytest
import torch

from engines.program import CandidateFailed, ReplayRequest
from hotpass.errors import InputError

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2], [7] * 20, [11, 12, 13], [5, 4, 3, 2, 1, 0], [30, 31])
OUTPUTS = (5, 7, 1, 4, 3, 6)
REQUESTS = tuple(
    ReplayRequest(request_id=10 + i, tokens=tuple(prompt), output_tokens=count)
    for i, (prompt, count) in enumerate(zip(PROMPTS, OUTPUTS, strict=True))
)


def replayed(world, *, concurrency, side="incumbent", requests=REQUESTS, poison=False):
    """request_id → tokens, and the events."""
    events = []
    world.program.replay(side, requests, concurrency, events.append, poison_freed=poison)
    made = {request.request_id: [] for request in requests}
    for event in events:
        for request_id, token in event.finished_tokens:
            made[request_id].append(token)
    return made, events


@pytest.mark.parametrize("concurrency", [1, 2, 3, 9])
def test_tokens_do_not_depend_on_the_batch_nor_on_what_freed_slots_hold(world, concurrency):
    expected = {r.request_id: world.greedy(r.tokens, r.output_tokens) for r in REQUESTS}
    made, events = replayed(world, concurrency=concurrency, poison=True)
    assert made == expected
    assert [event.step for event in events] == list(range(len(events)))
    assert max(event.num_seqs for event in events) == min(concurrency, 4)  # four serving slots
    assert sum(event.query_tokens for event in events) == sum(map(len, PROMPTS)) + sum(OUTPUTS) - len(OUTPUTS)


def test_chunks_bound_the_prompt_tokens_of_a_step(world):
    expected = {r.request_id: world.greedy(r.tokens, r.output_tokens) for r in REQUESTS}
    world.program.install(
        "candidate", world.candidate(settings={"chunk_tokens": 64}), world.artefacts(world.candidate()), 0
    )
    world.program._loaded("candidate", 0).settings["chunk_tokens"] = 6  # smaller than a person may ask for
    made, events = replayed(world, side="candidate", concurrency=3)
    assert made == expected
    assert max(event.query_tokens for event in events) <= 6 + 3
    assert {event.phase for event in events} == {"prefill", "mixed", "decode"}


def test_max_batch_bounds_the_sequences_of_a_step(world):
    world.program.install(
        "candidate", world.candidate(settings={"max_batch": 2}), world.artefacts(world.candidate()), 0
    )
    made, events = replayed(world, side="candidate", concurrency=4)
    assert max(event.num_seqs for event in events) == 2
    assert made == replayed(world, concurrency=4)[0]


def test_steps_follow_the_counting_simulation(world):
    from hotpass.traffic.records import Request
    from hotpass.traffic.simulate import count_steps

    requests = [Request(arrival_ms=0.0, input_tokens=len(r.tokens), output_tokens=r.output_tokens) for r in REQUESTS]
    counts = count_steps(requests, concurrency=1, chunk_tokens=512, max_batch=0, seed=0)
    _, events = replayed(world, concurrency=1)
    assert len(events) == counts.steps.sum()
    assert sum(event.query_tokens for event in events) == (counts.steps * counts.query_tokens).sum()


def test_generate_gives_each_prompt_its_continuation(world):
    assert world.program.generate("candidate", PROMPTS, 4) == [world.greedy(prompt, 4) for prompt in PROMPTS]


@pytest.mark.parametrize("side", ["incumbent", "reference"])
@pytest.mark.parametrize("length", [1, 2, 13, 40])
def test_score_gives_the_logits_of_every_position(world, length, side):
    tokens = world.tokens(length, seed=3)
    out = torch.full((length, 97), float("nan"))
    steps = world.program._loaded(side, 0).step
    before = steps.serial
    world.program.score(side, 0, tokens.tolist(), out)
    torch.testing.assert_close(out, world.logits(tokens), rtol=0, atol=1e-5)
    passes = steps.serial - before
    assert passes <= 2 if side == "reference" else passes >= length, (
        "the reference takes one pass, and the step before it again"
    )


def test_own_cache_models_serve_too(make_world):
    world = make_world("gemma3")
    expected = {r.request_id: world.greedy(r.tokens, r.output_tokens) for r in REQUESTS}
    assert replayed(world, concurrency=3)[0] == expected
    tokens = world.tokens(20, seed=3)
    out = torch.empty(20, 97)
    world.program.score("incumbent", 0, tokens.tolist(), out)
    torch.testing.assert_close(out, world.logits(tokens), rtol=0, atol=1e-5)


def test_a_part_is_counted_in_a_replay(world):
    world.install(world.program.part_template("model.norm"))
    counts = world.program.replay("candidate", REQUESTS, 3, lambda event: None)
    _, events = replayed(world, side="candidate", concurrency=3)
    assert counts == {"model.norm": len(events)}


def test_a_part_that_fails_in_a_replay_is_the_candidates_fault(world):
    text = world.program.part_template("model.norm").replace(
        "return rms_norm", "assert not (hidden_states > 9e9).any() and self.fine()\n        return rms_norm"
    )
    fine = "    calls = 0\n\n    def fine(self):\n        self.calls += 1\n        return self.calls < 12\n"
    world.install(text.replace("    def weights", fine + "\n    def weights"))
    with pytest.raises(CandidateFailed, match="AssertionError"):
        world.program.replay("candidate", REQUESTS, 3, lambda event: None)


@pytest.mark.parametrize(
    ("tokens", "output", "said"), [((1,) * 40, 9, "49 positions of 48"), ((), 3, "no prompt"), ((1,), 0, "no output")]
)
def test_impossible_requests_are_refused_before_any_runs(world, tokens, output, said):
    events = []
    bad = ReplayRequest(request_id=99, tokens=tokens, output_tokens=output)
    with pytest.raises(InputError, match=said):
        world.program.replay("incumbent", [*REQUESTS, bad], 2, events.append)
    assert events == []
