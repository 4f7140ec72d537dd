"""Whole requests through vLLM's own scheduler: replays in a closed loop, and plain generation.

    requests ──► LLMEngine.add_request (first `concurrency`, then one for each that ends) ──► step, step, … ──► StepEvent each

Prefixes are cached by what computed them: the salt of every request names the weights' epoch, the candidate and this very run, so that
nothing is read that another side, or the same side before its last install, has computed.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from engines.program import ReplayRequest, StepEvent

_serial = itertools.count()


def serve(
    llm: Any, requests: Sequence[ReplayRequest], concurrency: int, salt: str, emit: Callable[[StepEvent], None]
) -> dict[int, list[int]]:
    """Serve all; request id → tokens made. Whatever a forward raises passes through, with the scheduler empty again."""
    engine = llm.llm_engine
    salt = f"{salt}/{next(_serial)}"
    waiting = deque(requests)
    names: dict[str, ReplayRequest] = {}
    made: dict[int, list[int]] = {item.request_id: [] for item in requests}
    start, step = time.perf_counter(), 0
    try:
        while waiting or names:
            while waiting and len(names) < concurrency:
                request = waiting.popleft()
                names[_submit(engine, request, salt)] = request
            outputs = engine.step()
            finished = []
            for output in outputs:
                request = names[output.request_id]
                tokens = list(output.outputs[0].token_ids)
                made[request.request_id] += tokens
                finished += [(request.request_id, token) for token in tokens]
                if output.finished:
                    del names[output.request_id]
            emit(_event(engine, step, tuple(finished), time.perf_counter() - start))
            step += 1
    except BaseException:
        abandon(engine, list(names))
        raise
    return made


def abandon(engine: Any, names: Sequence[str]) -> None:
    """Take requests out of the scheduler after a step that raised."""
    _runner(engine).execute_model_state = None
    engine.abort_request(list(names))


def _submit(engine: Any, request: ReplayRequest, salt: str) -> str:
    wanted = SamplingParams(
        max_tokens=request.output_tokens,
        min_tokens=request.output_tokens,
        ignore_eos=True,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    name = f"serve-{next(_serial)}"
    engine.add_request(name, {"prompt_token_ids": list(request.tokens), "cache_salt": salt}, wanted)
    return name


def _event(engine: Any, step: int, finished: tuple[tuple[int, int], ...], seconds: float) -> StepEvent:
    """The batch that just ran is still in the runner."""
    runner = _runner(engine)
    count = int(runner.input_batch.num_reqs)
    starts = runner.query_start_loc.np[: count + 1]
    tokens = int(starts[-1])
    decoding = int((starts[1:] - starts[:-1] == 1).sum())
    phase = "decode" if decoding == count else "mixed" if decoding else "prefill"
    return StepEvent(
        step=step,
        finished_tokens=finished,
        phase=phase,
        num_seqs=count,
        query_tokens=tokens,
        child_seconds=seconds,
    )


def _runner(engine: Any) -> Any:
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
