"""Rounds of the slow tier: ABBA blocks of replays of the same requests, until the sequential test has seen enough.

requests, chosen once ─► block: four replays ─► log ratio of tokens/s ─► test ─► what was served, held against the reference
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from statistics import geometric_mean

from engines.judge.disturbance import waited_for
from engines.judge.pairing import Pair
from engines.judge.replay import Replay, requests_for, run_replay
from engines.judge.served import check_served
from engines.judge.underway import Attempt
from engines.program import CandidateFailed, ReplayRequest
from engines.stable import Stable
from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Assignment, MeasuredReplay, Side
from hotpass.stats import SequentialTest

REPLAY_TOKENS_SECONDS = 8.0
"""A replay of as loaded is meant to take about so long, where the assignment leaves it to the engine."""

UNKNOWN_TOKENS_PER_SECOND = 50.0
"""Of as loaded, where the pair child's A/A says nothing about the whole model."""

Served = list[Mapping[int, Sequence[int]]]
"""Of each replay of the candidate: request id → tokens."""


class ReplayRounds:
    """Replays pairs on one engine."""

    def __init__(self, stable: Stable, whole_cut: int, concurrency: int, output_tokens_per_step: float) -> None:
        self._stable, self._whole_cut = stable, whole_cut
        self._concurrency, self._tokens_per_step = concurrency, output_tokens_per_step

    def until_decided(
        self, attempt: Attempt, pair: Pair, requests: Sequence[ReplayRequest], rng: random.Random, sample: random.Random
    ) -> None:
        """Blocks until the test stops or another would pass the deadline. `rng` orders them, `sample` draws the tokens that are
        checked. Raises CandidateFailed."""
        chosen = self._chosen(attempt.assignment, requests)
        served: Served = []
        test, longest = SequentialTest(attempt.assignment.stopping), 0.0
        while test.decision() is None:
            start = time.monotonic()
            if test.values and start + 1.2 * longest > attempt.deadline:
                break
            order = rng.choice(("ABBA", "BAAB"))
            block = self._block(attempt, pair, chosen, len(test.values), order, served)
            attempt.replays.append(block)
            test.add(block.log_ratio)
            longest = max(longest, time.monotonic() - start)
        if served:
            attempt.tokens = check_served(self._stable, self._whole_cut, chosen, served, sample)

    def _block(
        self, attempt: Attempt, pair: Pair, requests: Sequence[ReplayRequest], index: int, order: str, served: Served
    ) -> MeasuredReplay:
        """Four replays. What the candidate served is added to `served`."""
        taken: dict[Side, list[Replay]] = {side: [] for side in Side}
        for letter in order:
            side = Side.INCUMBENT if letter == "A" else Side.CANDIDATE
            child, name = pair.place(side)
            start = time.monotonic()
            try:
                replay = run_replay(child, name, requests, self._concurrency, attempt.deadline)
            except CandidateFailed as error:
                if side is Side.CANDIDATE or not attempt.alone.groups:
                    raise
                waited = time.monotonic() - start
                raise waited_for(error, "a replay", waited, self._alone_seconds(attempt, requests)) from None
            taken[side].append(replay)
            if side is Side.CANDIDATE:
                attempt.evidence.activation.update(replay.activation)
                served.append(replay.tokens)
        a, b = taken[Side.INCUMBENT], taken[Side.CANDIDATE]
        return MeasuredReplay(
            round_index=index, order=order, incumbent=(a[0].stats, a[1].stats), candidate=(b[0].stats, b[1].stats)
        )

    def _alone_seconds(self, attempt: Attempt, requests: Sequence[ReplayRequest]) -> float:
        """What a replay of the incumbent beside itself would take, by its windows."""
        alone = attempt.alone.seconds()
        shares = {place: self._stable.recipe.rows[place[1]].steps_share for place in alone}
        step = sum(share * alone[place] for place, share in shares.items()) / sum(shares.values())
        return sum(item.output_tokens for item in requests) / self._tokens_per_step * step

    def _chosen(self, assignment: Assignment, requests: Sequence[ReplayRequest]) -> Sequence[ReplayRequest]:
        if assignment.replay_requests:
            return requests[: assignment.replay_requests]
        seconds = min(REPLAY_TOKENS_SECONDS, assignment.deadline_seconds / (6 * assignment.stopping.min_rounds))
        return requests_for(requests, seconds * self._loaded_tokens_per_second(), self._concurrency)

    def _loaded_tokens_per_second(self) -> float:
        """Of as loaded over the whole model's rows, from the pair child's A/A."""
        known = self._stable.pair().beside_itself
        rows = self._stable.recipe.rows
        times = [known.get((AS_LOADED.id, (self._whole_cut, row))) for row in range(len(rows))]
        seconds = sum(row.steps_share * geometric_mean(time) for row, time in zip(rows, times, strict=True) if time)
        return self._tokens_per_step / seconds if seconds else UNKNOWN_TOKENS_PER_SECOND
