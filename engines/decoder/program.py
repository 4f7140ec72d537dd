"""What a child runs for causal language models: sides over shared weights, candidates installed on them, windows and serving.

    load ──► sides[name, cut] (tree + KV pool) ──install / uninstall──► run_window · replay · generate · score ──► fingerprint

Plain methods over plain data (`engines.program.Program`): no socket, no process, no verdict; so it also runs in a notebook.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engines.cuda.checksum import checksum_of
from engines.cuda.level import allocated_bytes, settle
from engines.cuda.timing import Sweep
from engines.decoder import baseline, fingerprint, templates
from engines.decoder.attention import StepState
from engines.decoder.batch import build_batch
from engines.decoder.install import install
from engines.decoder.kv import KvPool
from engines.decoder.kv_image import KvImage, sealed_image
from engines.decoder.own_cache import OwnCache
from engines.decoder.proof import PROBE_CONTEXT, PROBE_SLOTS, Proof
from engines.decoder.reference import (
    PLAIN_FAMILIES,
    Net,
    bind_step,
    build_net,
    check_ragged,
    cut_config,
    why_not_ragged,
)
from engines.decoder.serve import Limits, ServingLoop, logits_at, score_text
from engines.decoder.side import DecoderSide
from engines.decoder.slots import reference_source, slot_table
from engines.decoder.source import failed_by
from engines.decoder.windows import as_failure, run_window
from engines.heap import return_freed_memory
from engines.program import Artefacts, Echo, Fingerprint, KvPlan, ReplayRequest, StepEvent, WindowInputs, WindowReply
from engines.stopwatch import Stopwatch
from engines.threading_env import usable_cores
from hotpass.errors import InputError
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import FailureKind, ReloadReport
from hotpass.records.shapes import Phase
from hotpass.records.slots import SlotTable

if TYPE_CHECKING:
    from engines.prepare.store import WeightStore

SIDES = ("incumbent", "candidate", "reference")


class DecoderProgram:
    """`engines.program.Program` for Hugging Face causal LMs, on a CPU or a GPU."""

    def __init__(self) -> None:
        self._sides: dict[tuple[str, int], DecoderSide] = {}
        self._baselines: dict[tuple[str, int], DecoderSide] = {}
        self._images: dict[int, KvImage] = {}
        self._readers: dict[int, Net] = {}
        """As loaded, over whatever KV it is asked to read."""
        self._tables: dict[int, SlotTable] = {}
        self._born: dict[str, int] = {}
        self._kv_seconds = 0.0

    def load(
        self,
        model: ModelRef,
        weights: WeightStore,
        cuts: Sequence[tuple[int, ...]],
        device: str,
        threads: int,
        plan: KvPlan,
    ) -> dict[str, float]:
        """Sides `incumbent` and `candidate` of every cut; `reference` and probes are built when first asked for.

        `cuts` are layer indices of `model`; whatever serves whole requests runs on the deepest. Returns ms by phase.
        """
        watch = Stopwatch()
        torch.set_num_threads(threads)
        self._model, self._plan, self._threads, self._epoch = model, plan, threads, weights.epoch
        self._device = torch.device(device)
        torch.zeros(1, device=self._device)
        watch.lap("context")
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._cuts = [tuple(cut) for cut in cuts]
        self._deepest = max(range(len(cuts)), key=lambda index: len(cuts[index]))
        self._shallowest = min(range(len(cuts)), key=lambda index: len(cuts[index]))
        self._configs = [cut_config(model.folder, cut) for cut in self._cuts]
        shared = weights if device == "cpu" else _on_device(weights, self._device)
        self._written_to = () if device == "cpu" else tuple(shared.values())
        self._key = secrets.randbits(64)
        self._weights: list[Mapping[str, torch.Tensor]] = [shared.cut(cut) for cut in self._cuts]
        self._sweep = Sweep(self._device)
        self._reason = why_not_ragged(self._configs[0])
        watch.lap("weights")
        self._reason = self._reason or self._tried(self._shallowest)
        for cut in range(len(cuts)):
            for name in SIDES[:2]:
                self._sides[name, cut] = self._new_side(name, cut, self._dtype)
        watch.lap("skeleton")
        self._probe = self._new_probe()
        self._proof = Proof(self._probe, self._device)
        self._born = fingerprint.watched_callables(self._classes())
        fingerprint.start_worker_threads(max(threads, usable_cores()), threads)
        self._proof.warm_up()
        watch.lap("warm-up")
        kv = self._kv_seconds * 1e3
        return {**watch.phases_ms, "skeleton": watch.phases_ms["skeleton"] - kv, "kv": kv}

    def slots(self) -> SlotTable:
        """Of the deepest cut."""
        return self._table(self._deepest)

    def reference_source(self, slot: str) -> str:
        """Source of the class that a slot of the deepest cut stands for."""
        return reference_source(self._loaded("incumbent", self._deepest).net, slot)

    def part_template(self, slot: str) -> str:
        """A runnable part that does what the reference does at a slot, to start from."""
        return templates.part_template(self._loaded("incumbent", self._deepest).net, slot)

    def install(
        self,
        side: str,
        candidate: Candidate,
        artefacts: Artefacts,
        cut: int,
        rows: Sequence[int] | None = None,
    ) -> ReloadReport:
        """Slots in `artefacts.derived` are those of the cut (its layers counted from 0). Raises CandidateFailed."""
        self._baselines.pop((side, cut), None)
        target = self._loaded(side, cut)
        self._take_off(target)
        return install(target, candidate, artefacts, self._table(cut), lambda dtype: self._pool(cut, dtype), rows)

    def install_baseline(self, side: str, name: str, cut: int) -> dict[str, float]:
        """Transformers' own loop (`baseline.BASELINES`) on a side until its next install or uninstall. Returns ms by phase."""
        start = time.perf_counter()
        self._take_off(self._loaded(side, cut))
        made = baseline.baseline_side(
            side,
            name,
            config=self._configs[cut],
            weights=self._weights[cut],
            device=self._device,
            plan=self._plan,
            threads=self._threads,
        )
        self._baselines[side, cut] = made
        return {"skeleton": (time.perf_counter() - start) * 1e3}

    def uninstall(self, side: str) -> None:
        """Raises CandidateFailed when a part's close fails; the side is as loaded even then."""
        for cut in range(len(self._cuts)):
            self._baselines.pop((side, cut), None)
            if (side, cut) in self._sides:
                self._take_off(self._sides[side, cut])
        torch.set_num_threads(self._threads)
        return_freed_memory()
        settle(self._device)

    def compute_contexts(self, cut: int, row: int, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """KV float32 [layers, 2, kv_heads, context, head_dim] of each sequence; the tokens themselves where the model keeps
        its own cache, so that each side computes its contexts by its own prefill."""
        side = self._loaded("reference", cut)
        if side.own is not None:
            return [sequence.clone() for sequence in tokens]
        side.activate()
        contexts = []
        with torch.inference_mode():
            for slot, sequence in zip(self._plan.row_slots(row), tokens, strict=True):
                if len(sequence):
                    ids = sequence.to(self._device)
                    side.run(build_batch(ids, contexts=[0], query_lens=[len(ids)], slots=[slot]))
                contexts.append(side.kv.read(slot, len(sequence)).cpu())
        return contexts

    def load_contexts(self, side: str, cut: int, row: int, contexts: Sequence[torch.Tensor]) -> None:
        """KV as `compute_contexts` gives it, or token ids (int64 [context]), for which the side computes its own."""
        target = self._side(side, cut)
        target.load_contexts(row, contexts)

    def context_image(self, cut: int, contexts: Mapping[int, Sequence[torch.Tensor]]) -> int | None:
        """Of a side as loaded. None on a GPU, and where contexts are token ids."""
        by_slot = {
            slot: context
            for row, items in contexts.items()
            for slot, context in zip(self._plan.row_slots(row), items, strict=True)
        }
        if self._device.type != "cpu" or any(context.ndim == 1 for context in by_slot.values()):
            return None
        return sealed_image(self._loaded("incumbent", cut).kv, by_slot)

    def keep_image(self, cut: int, fd: int) -> None:
        plan = self._plan
        lengths = {
            slot: length
            for row in range(len(plan.rows))
            for slot, length in zip(plan.row_slots(row), plan.row_contexts(row), strict=True)
        }
        self._images[cut] = KvImage(fd, self._loaded("incumbent", cut).kv, lengths)

    def cover(self, side: str, cut: int) -> bool:
        """Not a side with a cache of its own, nor one whose candidate has KV of another type, nor memory that is not the engine's: a
        mapping there would take away whatever lies beside it."""
        target, image = self._side(side, cut), self._images.get(cut)
        if image is None or target.own is not None or not target.keeps_its_kv or not image.fits(target.kv):
            return False
        image.cover(target.kv)
        return True

    def run_window(self, side: str, cut: int, row: int, inputs: WindowInputs, out: torch.Tensor) -> WindowReply:
        reply = run_window(self._side(side, cut), row, inputs, out)
        self._sweep()
        return reply

    def echo(self, side: str, cut: int | None) -> Echo:
        on = self._loaded(side, self._deepest if cut is None else cut)
        return Echo(candidate_id=on.candidate.id, epoch=self._epoch)

    def replay(
        self,
        side: str,
        requests: Sequence[ReplayRequest],
        concurrency: int,
        emit: Callable[[StepEvent], None],
        *,
        poison_freed: bool = False,
    ) -> Mapping[str, int]:
        """On the deepest cut. Raises CandidateFailed for what a candidate's code raised, InputError for a request too long."""
        target = self._side(side, self._deepest)
        self._serve(target, requests, concurrency, emit, poison_freed)
        return target.counts()

    def generate(self, side: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        requests = [
            ReplayRequest(request_id=index, tokens=tuple(prompt), output_tokens=max_tokens)
            for index, prompt in enumerate(prompts)
        ]
        made = self._serve(self._side(side, self._deepest), requests, len(requests), lambda event: None, False)
        return [made[index] for index in range(len(requests))]

    def score(self, side: str, cut: int, tokens: Sequence[int], out: torch.Tensor) -> None:
        target = self._side(side, cut)
        self._needs_serving("a text to score", len(tokens))
        target.activate()
        target.reset_counts()
        try:
            score_text(target, tokens, int(target.settings["chunk_tokens"] or 1), out)
        except (Exception, SystemExit) as error:
            if target.installed is None:
                raise
            raise as_failure(error) from None

    def answer_from_kv(self, side: str, cut: int, row: int, tokens: Sequence[int], out: torch.Tensor) -> bool:
        """By a tree of its own: no part that is installed anywhere takes part in it."""
        kv, plan, item = self._side(side, cut).kv, self._plan, self._plan.rows[row]
        if self._reason or kv.num_layers == 0:
            return False
        if cut not in self._readers:
            self._readers[cut] = self._new_net(cut, self._dtype, StepState(kv))
        steps = plan.steps_per_window[row] if item.phase == Phase.DECODE else 1
        lengths = zip(plan.row_contexts(row), plan.row_query_lens(row), strict=True)
        batch = build_batch(
            torch.tensor(list(tokens), device=self._device),
            contexts=[context + query * steps - 1 for context, query in lengths],
            query_lens=[1] * item.num_seqs,
            slots=plan.row_slots(row),
        )
        reader = self._readers[cut]
        reader.step.kv = kv
        with torch.inference_mode():
            reader.step.begin(batch)
            out[0].copy_(reader.forward(batch, kv))
        return True

    def logits_at(
        self, side: str, cut: int, tokens: Sequence[int], positions: Sequence[int], out: torch.Tensor
    ) -> None:
        """As loaded or by the reference, for whoever checks what a candidate has served."""
        self._needs_serving("a text to check", len(tokens))
        target = self._side(side, cut)
        target.activate()
        logits_at(target, tokens, positions, out)

    def profile(
        self, side: str, cut: int, row: int, slots: Sequence[str], tokens: torch.Tensor
    ) -> tuple[dict[str, Any], bytes]:
        """Figures of a row and its Chrome trace (`engines.decoder.observed`), for a child that is discarded afterwards."""
        from engines.decoder.observed import profile_row

        target = self._side(side, cut)
        try:
            return profile_row(target, self._loaded("incumbent", cut), slots, row, tokens.to(self._device))
        except (Exception, SystemExit) as error:
            raise as_failure(error) from None

    def state(self) -> Mapping[str, str]:
        """Random numbers and the environment are a candidate's own business while it is installed."""
        changed = self._proof.changed(self._trees())
        flags = {**fingerprint.flags(self._born, self._classes()), "trees": ", ".join(sorted(changed))}
        return {name: value for name, value in flags.items() if name not in ("random", "environment")}

    def fingerprint(self, whole: bool = False) -> Fingerprint:
        """Of the process, and the proof of its trees (`proof`), by the threads it was loaded with."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        changed = self._proof.changed(self._trees())
        digests = self._proof.digests(self._sides.values(), changed.values(), whole=whole)
        torch.set_num_threads(threads)
        return Fingerprint(
            probes=digests,
            flags={
                **fingerprint.flags(self._born, self._classes()),
                "trees": ", ".join(sorted(changed)),
                **self._weights_now(),
            },
            threads_alive=fingerprint.threads_alive(),
            children_alive=fingerprint.children_alive(),
            resident_bytes=fingerprint.resident_bytes(),
            open_files=fingerprint.open_files(),
            device_bytes=allocated_bytes(self._device),
        )

    def _weights_now(self) -> dict[str, str]:
        """Those of a GPU may have been written to; sealed memory cannot. The keeper looks too, where they are its own."""
        return {"weights": checksum_of(self._written_to, self._key)} if self._written_to else {}

    def _serve(
        self,
        target: DecoderSide,
        requests: Sequence[ReplayRequest],
        concurrency: int,
        emit: Callable[[StepEvent], None],
        poison_freed: bool,
    ) -> dict[int, list[int]]:
        self._needs_serving("requests", 1)
        target.activate()
        target.reset_counts()
        most = int(target.settings["max_batch"] or 0) or concurrency
        limits = Limits(
            sequences=max(1, min(concurrency, most)), chunk_tokens=int(target.settings["chunk_tokens"] or 1)
        )
        try:
            return ServingLoop(target, limits, poison_freed=poison_freed).run(requests, emit)
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            if target.installed is None:
                raise
            raise as_failure(error) from None

    def _needs_serving(self, what: str, positions: int) -> None:
        if self._plan.serving_slots == 0:
            raise InputError("serving_slots", 0, f"leaves no slot for {what}", "load with serving slots")
        if positions > self._plan.serving_context:
            raise InputError(
                "serving_context", self._plan.serving_context, f"is shorter than {positions}", "load with more"
            )

    def _take_off(self, side: DecoderSide) -> None:
        try:
            side.uninstall()
        except (Exception, SystemExit) as error:
            raise failed_by(error, FailureKind.EXCEPTION, "a part does not close") from None

    def _side(self, name: str, cut: int) -> DecoderSide:
        return self._baselines.get((name, cut)) or self._loaded(name, cut)

    def _loaded(self, name: str, cut: int) -> DecoderSide:
        if name not in SIDES:
            raise InputError("side", name, "is not a side", f"use one of {list(SIDES)}")
        if (name, cut) not in self._sides:
            dtype = torch.float32 if name == "reference" else self._dtype
            self._sides[name, cut] = self._new_side(name, cut, dtype)
        return self._sides[name, cut]

    def _new_side(self, name: str, cut: int, dtype: torch.dtype) -> DecoderSide:
        kv = self._pool(cut, dtype if name == "reference" else None)
        net = self._new_net(cut, dtype, StepState(kv))
        own = None
        if self._reason:
            own = OwnCache(net.config, net.model, dtype=dtype, device=self._device, batched=False)
        return DecoderSide(name, net, kv, self._plan, self._threads, own)

    def _new_net(self, cut: int, dtype: torch.dtype, step: StepState) -> Net:
        attention = "sdpa" if self._reason else "hotpass"
        model = build_net(self._configs[cut], self._weights[cut], dtype=dtype, device=self._device, attention=attention)
        if not self._reason:
            bind_step(model, step)
        return Net(self._configs[cut], model, step, self._reason)

    def _new_probe(self) -> DecoderSide:
        cut = self._shallowest
        kv = self._pool(cut, None, num_slots=PROBE_SLOTS, max_context=PROBE_CONTEXT)
        return DecoderSide("probe", self._new_net(cut, self._dtype, StepState(kv)), kv, self._plan, self._threads, None)

    def _tried(self, cut: int) -> str:
        """Why the tree cannot run ragged after all, by a trial on the smallest cut; families known to be plain need none."""
        if self._configs[cut].model_type in PLAIN_FAMILIES:
            return ""
        kv = self._pool(cut, None, num_slots=1, max_context=PROBE_CONTEXT)
        try:
            return check_ragged(self._new_net(cut, self._dtype, StepState(kv)), kv, self._device)
        except Exception as error:
            return f"{self._configs[cut].model_type} does not take another attention ({type(error).__name__}: {error})"

    def _pool(
        self, cut: int, dtype: torch.dtype | None, *, num_slots: int | None = None, max_context: int | None = None
    ) -> KvPool:
        start = time.perf_counter()
        pool = KvPool(
            num_layers=0 if self._reason else len(self._cuts[cut]),
            num_slots=self._plan.num_slots if num_slots is None else num_slots,
            kv_heads=self._model.num_kv_heads,
            max_context=self._plan.max_context if max_context is None else max_context,
            head_dim=self._model.head_dim,
            dtype=dtype or self._dtype,
            device=self._device,
        )
        self._kv_seconds += time.perf_counter() - start
        return pool

    def _table(self, cut: int) -> SlotTable:
        if cut not in self._tables:
            self._tables[cut] = slot_table(self._loaded("incumbent", cut).net)
        return self._tables[cut]

    def _trees(self) -> dict[str, DecoderSide]:
        return {f"{name}/{cut}": side for (name, cut), side in self._sides.items()}

    def _classes(self) -> set[type]:
        return {type(module) for module in self._probe.net.modules.values()}


def _on_device(weights: WeightStore, device: torch.device) -> Any:
    """Weights copied to a GPU once for all sides and cuts."""
    from engines.prepare.store import WeightStore as Store

    moved: dict[int, torch.Tensor] = {}
    for tensor in weights.values():
        moved.setdefault(id(tensor), tensor.to(device))
    return Store({name: moved[id(tensor)] for name, tensor in weights.items()})
