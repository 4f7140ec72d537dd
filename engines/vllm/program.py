"""What a child runs for a live vLLM engine: one loaded engine, candidates on its tree, windows and serving.

    load ──► vllm.LLM (one rank, in this process) + worker extension ──install / activate──► run_window · replay · generate ──► fingerprint

The same methods as `engines.decoder.program`, so the same judge measures it. The reference is not here: it is the decoder engine's, in
another process, and its contexts are written into vLLM's pages.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.config as inductor
from vllm import LLM, ModelRegistry
from vllm.version import __version__ as VLLM_VERSION

from engines.decoder import fingerprint
from engines.decoder.source import failed_by
from engines.program import (
    Artefacts,
    CandidateFailed,
    Echo,
    Fingerprint,
    KvPlan,
    ReplayRequest,
    StepEvent,
    WindowInputs,
    WindowReply,
)
from engines.vllm.environment import OPTIONS_VARIABLE
from engines.vllm.extension import ARTEFACTS
from engines.vllm.folder import model_folder, raise_loopback
from engines.vllm.rows import Rows
from engines.vllm.serving import serve
from engines.vllm.steps import Pages, Sequences
from engines.vllm.watched import watched_modules
from hotpass.canonical import content_hash, to_plain
from hotpass.decode import from_plain
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import Failure, FailureKind, ReloadReport
from hotpass.records.slots import SlotTable

if TYPE_CHECKING:
    from engines.prepare.store import WeightStore

EXTENSION = "engines.vllm.extension.HotpassExtension"
SIDES = ("incumbent", "candidate")
PROBE = (1, 5, 2, 7, 3)
"""Token ids of the fingerprint's probe: a prompt, then two decode steps."""
SCORE_CHUNK = 64


class VllmProgram:
    """`engines.program.Program` for one live vLLM engine."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._pages: Pages
        self._rows: Rows

    def load(
        self,
        model: ModelRef,
        weights: WeightStore,
        cuts: Sequence[tuple[int, ...]],
        device: str,
        threads: int,
        plan: KvPlan,
    ) -> dict[str, float]:
        """The whole model only. `weights` stay mapped for the proof that they are where they were; vLLM reads the folder's files."""
        start = time.perf_counter()
        if list(cuts) != [tuple(range(model.num_layers))] or device != "cpu":
            raise InputError("cuts", list(cuts), f"on {device} are not for vLLM", "load the whole model on the CPU")
        raise_loopback()
        # The folder of precompiled headers was chosen before the fork, where a child may not write.
        inductor.cpp_cache_precompile_headers = False
        inductor.compile_threads = 1
        self._model, self._weights, self._plan, self._threads = model, weights, plan, threads
        self._epoch = weights.epoch
        self._salt = content_hash([weights.epoch, model.weights_hash, model.config_hash, model.dtype, VLLM_VERSION])
        options = json.loads(os.environ[OPTIONS_VARIABLE])
        folder = model_folder(model, tempfile.gettempdir())
        known = ModelRegistry.models.get(model.architecture)
        if (
            known is not None
        ):  # imported here, it need not be looked into by a process of its own, which would import vLLM anew
            ModelRegistry.register_model(model.architecture, known.load_model_cls())
        self._llm = LLM(model=folder, dtype=model.dtype, worker_extension_cls=EXTENSION, **options)
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._rpc("hotpass_begin", VLLM_VERSION, threads)
        engine_at = time.perf_counter()
        self._pages = Pages(self._core)
        self._rows = Rows(self._core, self._pages, plan, SIDES)
        self._probe_pages = self._pages.take(len(PROBE) + 2)
        self._rows.warm(SIDES[0])
        self._probe()
        self._modules = watched_modules()
        self._born = fingerprint.watched_callables(self._classes(), self._modules)
        return {"engine": (engine_at - start) * 1e3, "warm-up": (time.perf_counter() - engine_at) * 1e3}

    def slots(self) -> SlotTable:
        return from_plain(SlotTable, self._rpc("hotpass_slots"))

    def part_template(self, slot: str) -> str:
        """A runnable part that does what vLLM does at a slot, to start from."""
        text: str = self._rpc("hotpass_template", slot)
        return text

    def install(
        self,
        side: str,
        candidate: Candidate,
        artefacts: Artefacts,
        cut: int,
        rows: Sequence[int] | None = None,
    ) -> ReloadReport:
        """By the worker's named method. Raises CandidateFailed."""
        start = time.perf_counter()
        ARTEFACTS[candidate.id] = artefacts
        order = {
            "side": side,
            "candidate": to_plain(candidate),
            "candidate_id": candidate.id,
            "sources": [use.source.sha256 for use in candidate.parts],
        }
        try:
            reply = self._rpc("hotpass_install", order)
        finally:
            ARTEFACTS.pop(candidate.id, None)
        if "failure" in reply:
            raise CandidateFailed(from_plain(Failure, reply["failure"]))
        report = from_plain(ReloadReport, reply["report"])
        swapped = time.perf_counter()
        try:
            if candidate.parts and self._rpc("hotpass_compiles"):
                self._recapture(side)
            else:
                self._activate(side)
            self._rows.warm(side, rows)
        except (Exception, SystemExit) as error:
            self._rpc("hotpass_uninstall", side)
            raise failed_by(error, FailureKind.EXCEPTION, "the forward fails") from None
        self._rpc("hotpass_reset_counts", side)
        phases = {
            **report.phases_ms,
            "swap": (swapped - start) * 1e3 - sum(report.phases_ms.values()),
            "warm-up": (time.perf_counter() - swapped) * 1e3,
        }
        return dataclasses.replace(report, phases_ms=phases)

    def uninstall(self, side: str) -> None:
        try:
            self._rpc("hotpass_uninstall", side)
        except (Exception, SystemExit) as error:
            raise failed_by(error, FailureKind.EXCEPTION, "a part does not close") from None

    def compute_contexts(self, cut: int, row: int, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Never asked for: contexts are the reference's, which is another program."""
        raise InputError("contexts", row, "are not computed by vLLM", "ask the reference child")

    def load_contexts(self, side: str, cut: int, row: int, contexts: Sequence[torch.Tensor]) -> None:
        self._activate(side)
        self._rows.load_contexts(side, row, contexts)

    def run_window(self, side: str, cut: int, row: int, inputs: WindowInputs, out: torch.Tensor) -> WindowReply:
        """Steps through vLLM's runner and sampler. A candidate's fault is the reply's `failure`."""
        self._activate(side)
        self._rpc("hotpass_reset_counts", side)
        compiled, failure, done = _compiled(), None, 0
        start = time.perf_counter()
        try:
            for done, logits in enumerate(self._rows.steps(side, row, inputs.tokens), start=1):
                out[done - 1].copy_(logits)
        except (Exception, SystemExit) as error:
            if not self._rpc("hotpass_installed", side):
                raise
            failure = failed_by(error, FailureKind.EXCEPTION, "the forward fails").failure
        seconds = time.perf_counter() - start
        return WindowReply(
            nonce=inputs.nonce,
            seconds=seconds,
            steps=done,
            activation=self._rpc("hotpass_counts", side),
            compile_events=_compiled() - compiled,
            failure=failure,
        )

    def echo(self, side: str, cut: int | None) -> Echo:
        return Echo(candidate_id=self._rpc("hotpass_installed", side) or AS_LOADED.id, epoch=self._epoch)

    def replay(
        self,
        side: str,
        requests: Sequence[ReplayRequest],
        concurrency: int,
        emit: Callable[[StepEvent], None],
    ) -> Mapping[str, int]:
        self._serve(side, requests, concurrency, emit)
        counts: dict[str, int] = self._rpc("hotpass_counts", side)
        return counts

    def generate(self, side: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        requests = [
            ReplayRequest(request_id=index, tokens=tuple(prompt), output_tokens=max_tokens)
            for index, prompt in enumerate(prompts)
        ]
        made = self._serve(side, requests, len(requests), lambda event: None)
        return [made[index] for index in range(len(requests))]

    def score(self, side: str, cut: int, tokens: Sequence[int], out: torch.Tensor) -> None:
        """The first half decoded from the first token on; then again as prefill chunks, and the rest decoded after them."""
        half = max(1, len(tokens) // 2)
        chunks = [min(SCORE_CHUNK, half - start) for start in range(0, half, SCORE_CHUNK)]
        try:
            for position, logits in enumerate(self._text(side, tokens[:half], [1] * half)):
                out[position].copy_(logits)
            steps = list(self._text(side, tokens, [*chunks, *[1] * (len(tokens) - half)], keep=len(tokens) - half + 1))
        except (Exception, SystemExit) as error:
            if not self._rpc("hotpass_installed", side):
                raise
            raise failed_by(error, FailureKind.EXCEPTION, "the forward fails") from None
        for position, logits in enumerate(steps, start=half - 1):
            out[position].copy_(logits)

    def answer_from_kv(self, side: str, cut: int, row: int, tokens: Sequence[int], out: torch.Tensor) -> bool:
        """As loaded, the last position of each sequence again, on the pages that the side's last window left."""
        self._activate("")
        out[0].copy_(self._rows.answer(side, row, tokens))
        return True

    def logits_at(
        self, side: str, cut: int, tokens: Sequence[int], positions: Sequence[int], out: torch.Tensor
    ) -> None:
        starts = [0, *(position + 1 for position in positions[:-1])]
        counts = [position + 1 - start for start, position in zip(starts, positions, strict=True)]
        for index, logits in enumerate(self._text(side, tokens, counts)):
            out[index].copy_(logits)

    def profile(
        self, side: str, cut: int, row: int, slots: Sequence[str], tokens: torch.Tensor
    ) -> tuple[dict[str, Any], bytes]:
        """Figures of a row and its Chrome trace (`engines.vllm.observed`), for a child that is discarded afterwards."""
        from engines.vllm.observed import profile_row

        try:
            return profile_row(self._worker()._hotpass_tree, self._rows, side, row, slots, tokens)
        except (Exception, SystemExit) as error:
            raise failed_by(error, FailureKind.EXCEPTION, "the forward fails") from None

    def state(self) -> Mapping[str, str]:
        """Random numbers and the environment are a candidate's own business while it is installed."""
        return {name: value for name, value in self._flags().items() if name not in ("random", "environment")}

    def fingerprint(self, whole: bool = False) -> Fingerprint:
        digest = fingerprint.logits_digest(self._probe())
        return Fingerprint(
            probes={"model": digest},
            flags=self._flags(),
            threads_alive=fingerprint.threads_alive(),
            children_alive=fingerprint.children_alive(),
            resident_bytes=fingerprint.resident_bytes(),
            open_files=fingerprint.open_files(),
        )

    def _worker(self) -> Any:
        """The one rank's, in this process."""
        return self._core.model_executor.driver_worker.worker

    def _rpc(self, method: str, *arguments: Any) -> Any:
        return self._llm.collective_rpc(method, args=arguments)[0]

    def _activate(self, side: str) -> None:
        self._rpc("hotpass_activate", side)

    def _recapture(self, side: str) -> None:
        """One eager step, one that compiles: several tokens each, since a step of one would be compiled for one."""
        for phase in ("hotpass_learn", "hotpass_recapture"):
            self._rpc(phase, side)
            self._step_probe()
        self._rpc("hotpass_recaptured", side)

    def _text(self, side: str, tokens: Sequence[int], counts: Sequence[int], keep: int = 0) -> list[torch.Tensor]:
        """Logits [vocab] after each count of tokens of one text; only the last `keep` where that is positive."""
        self._activate(side if side in SIDES else "")
        blocks = self._pages.take(len(tokens))
        found = []
        try:
            with Sequences(self._core, [blocks], [0], [tokens]) as sequences:
                for count in counts:
                    found.append(sequences.step([count])[0].clone())
        finally:
            self._pages.give_back(blocks)
        return found[-keep:] if keep else found

    def _serve(
        self, side: str, requests: Sequence[ReplayRequest], concurrency: int, emit: Callable[[StepEvent], None]
    ) -> dict[int, list[int]]:
        longest = max(len(item.tokens) + item.output_tokens for item in requests)
        if longest > self._plan.serving_context:
            raise InputError("serving_context", self._plan.serving_context, f"is shorter than {longest}", "load more")
        self._activate(side)
        self._rpc("hotpass_reset_counts", side)
        installed = self._rpc("hotpass_installed", side)
        try:
            return serve(self._llm, requests, concurrency, f"{self._salt}/{installed}", emit)
        except (Exception, SystemExit) as error:
            if not installed:
                raise
            raise failed_by(error, FailureKind.EXCEPTION, "the forward fails") from None

    def _probe(self) -> list[torch.Tensor]:
        """As loaded on fixed tokens: one prompt, two decode steps. Leaves no side active."""
        self._activate("")
        return self._step_probe()

    def _step_probe(self) -> list[torch.Tensor]:
        with Sequences(self._core, [self._probe_pages], [0], [[*PROBE, 4, 6]]) as sequences:
            return [sequences.step([count]).clone() for count in (len(PROBE), 1, 1)]

    def _flags(self) -> dict[str, str]:
        self._activate("")
        found = fingerprint.flags(self._born, self._classes(), self._modules)
        return {**found, "trees": self._rpc("hotpass_structure")}

    def _classes(self) -> set[type]:
        runner = self._worker().model_runner
        return {type(module) for module in runner.model.modules()} | {type(runner), VllmProgram, Sequences}


def _compiled() -> int:
    """Frames that dynamo compiled in this process; grows, never falls."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["frames"]["total"]) if dynamo is not None else 0
