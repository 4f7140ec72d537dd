"""A deterministic Program in plain torch: one embedding, a context that is a sum, and parts that are executed as text.

It stands in for a model where the processes and the judge are what is tested. A candidate's part is a class with
`forward(self, tokens, summary, reference)`; `reference` computes what as loaded would.
"""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from engines.program import CandidateFailed, Echo, Fingerprint, StepEvent, WindowReply
from hotpass.records.candidate import AS_LOADED, Candidate, Reload
from hotpass.records.measurement import Failure, FailureKind, ReloadReport, Side, Tier
from hotpass.records.slots import Slot, SlotTable

EMBEDDING = "model.embed_tokens.weight"


class ToyProgram:
    def load(self, model: Any, weights: Any, cuts: Any, device: str, threads: int, plan: Any) -> dict[str, float]:
        torch.set_num_threads(threads)
        self.weights, self.cuts, self.plan = weights, cuts, plan
        self.summaries: dict[tuple[str, int, int], list[float]] = {}
        self.installed: dict[tuple[str, int], Any] = {}
        self.candidates: dict[tuple[str, int], Candidate] = {}
        self.embedding = weights[EMBEDDING].float()
        return {"skeleton": 1.0}

    def slots(self) -> SlotTable:
        slot = Slot(
            name="model", stands_for="forward", signature="(tokens)", reference_sha256="0", lowest_tier=Tier.FAST
        )
        return SlotTable(engine="decoder", version="toy", slots=(slot,))

    def install(
        self, side: str, candidate: Any, artefacts: Any, cut: int, rows: Sequence[int] | None = None
    ) -> ReloadReport:
        for use in candidate.parts:
            space: dict[str, Any] = {"program": self, "artefacts": artefacts}
            try:
                exec(use.source.text(), space)
                self.installed[side, cut] = space["Part"]()
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                raise CandidateFailed(Failure(kind=FailureKind.INSTALL, message=message)) from None
        self.candidates[side, cut] = candidate
        return ReloadReport(
            candidate_id=candidate.id, side=Side(side), declared=Reload.HOT, actual=Reload.HOT, slots=("model",)
        )

    def install_baseline(self, side: str, name: str, cut: int) -> dict[str, float]:
        return {}

    def uninstall(self, side: str) -> None:
        for book in (self.installed, self.candidates):
            for key in [key for key in book if key[0] == side]:
                del book[key]
        gc.collect()

    def compute_contexts(self, cut: int, row: int, tokens: Any) -> list[torch.Tensor]:
        return [self.embedding[ids].mean(dim=1) if len(ids) else torch.zeros(0) for ids in tokens]

    def load_contexts(self, side: str, cut: int, row: int, contexts: Any) -> None:
        self.summaries[side, cut, row] = [float(context.sum()) for context in contexts]

    def forward(self, tokens: torch.Tensor, summaries: Any, cut: int) -> torch.Tensor:
        hidden = self.embedding[tokens] * (1 + torch.tensor(summaries)[:, None])
        return len(self.cuts[cut]) * hidden @ self.embedding.T

    def run_window(self, side: str, cut: int, row: int, inputs: Any, out: torch.Tensor) -> WindowReply:
        start = time.perf_counter()
        part, calls = self.installed.get((side, cut)), 0
        ends = torch.tensor(self.plan.row_query_lens(row)).cumsum(0) - 1
        for step, tokens in enumerate(inputs.tokens):
            last, summaries = tokens[ends], self.summaries.get((side, cut, row), [0.0] * len(ends))
            if part is None:
                out[step] = self.forward(last, summaries, cut)
            else:
                calls += 1
                out[step] = part.forward(last, summaries, lambda a, b: self.forward(a, b, cut))
        time.sleep(0.002)  # a window that takes time without taking the processor
        seconds = time.perf_counter() - start
        activation = {"model": calls} if part else {}
        return WindowReply(nonce=inputs.nonce, seconds=seconds, steps=len(inputs.tokens), activation=activation)

    def echo(self, side: str, cut: int | None) -> Echo:
        on = len(self.cuts) - 1 if cut is None else cut
        candidate = self.candidates.get((side, on), AS_LOADED)
        return Echo(candidate_id=candidate.id, epoch=self.weights.epoch)

    def replay(self, side: str, requests: Any, concurrency: int, emit: Any) -> dict[str, int]:
        waiting, running, step = deque(requests), {}, 0
        while waiting or running:
            while waiting and len(running) < concurrency:
                request = waiting.popleft()
                running[request.request_id] = [request.output_tokens, request.tokens[-1]]
            made = []
            for number in list(running):
                left, token = running[number]
                made.append((number, token + 1))
                running[number] = [left - 1, token + 1]
                if running[number][0] == 0:
                    del running[number]
            emit(
                StepEvent(
                    step=step,
                    finished_tokens=tuple(made),
                    phase="decode",
                    num_seqs=len(made),
                    query_tokens=len(made),
                    child_seconds=0.0,
                )
            )
            step += 1
        return {"model": step} if self.installed.get((side, len(self.cuts) - 1)) else {}

    def generate(self, side: str, prompts: Any, max_tokens: int) -> list[list[int]]:
        return [[sum(prompt) % 97] * max_tokens for prompt in prompts]

    def score(self, side: str, cut: int, tokens: Any, out: torch.Tensor) -> None:
        part, ids = self.installed.get((side, cut)), torch.tensor(tokens)
        summaries = [0.0] * len(ids)
        if part is None:
            out[:] = self.forward(ids, summaries, cut)
        else:
            out[:] = part.forward(ids, summaries, lambda a, b: self.forward(a, b, cut))

    def answer_from_kv(self, side: str, cut: int, row: int, tokens: Any, out: torch.Tensor) -> bool:
        return False

    def logits_at(self, side: str, cut: int, tokens: Any, positions: Any, out: torch.Tensor) -> None:
        """As `replay` serves: the next token is the last one plus one."""
        for index, position in enumerate(positions):
            out[index] = 0.0
            out[index, tokens[position] + 1] = 1.0

    def state(self) -> dict[str, str]:
        return {"dtype": str(torch.get_default_dtype())}

    def fingerprint(self, whole: bool = False) -> Fingerprint:
        probe = self.forward(torch.arange(4), [0.5] * 4, 0).contiguous()
        return Fingerprint(
            probes={"model": hashlib.sha256(probe.numpy().tobytes()).hexdigest()},
            flags={"intra_op": str(torch.get_num_threads()), "dtype": str(torch.get_default_dtype())},
            threads_alive=threading.active_count(),
            children_alive=0,
            resident_bytes=0,
            open_files=len(os.listdir("/proc/self/fd")),
        )
