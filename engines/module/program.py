"""What a child runs for a module: sides over shared tensors, candidates on them, windows, served calls, fingerprint.

    load: recipe run again ──► tree over the keeper's tensors ──cloned──► sides ──install / uninstall──► run_window · replay · score

Plain methods over plain data (`engines.program.Program`). A module has no KV and makes no text: contexts are empty, a request is one
call of one example, and what is served is the place of the largest value in the first item's answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engines.cuda.level import allocated_bytes, settle
from engines.cuda.timing import Sweep
from engines.decoder import fingerprint
from engines.decoder.install import install
from engines.decoder.side import DecoderSide
from engines.decoder.source import failed_by
from engines.decoder.windows import as_failure, run_window
from engines.heap import return_freed_memory
from engines.module import slots
from engines.module.inputs import seeded_step, widened
from engines.module.prepare import constants_of, module_facts
from engines.module.recipe import run_recipe
from engines.module.side import ModuleSide, assign_tensors, cloned
from engines.program import Artefacts, Echo, Fingerprint, KvPlan, ReplayRequest, StepEvent, WindowInputs, WindowReply
from engines.threading_env import usable_cores
from hotpass.canonical import content_hash
from hotpass.errors import InputError, nearest
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import FailureKind, ReloadReport
from hotpass.records.slots import SlotTable

if TYPE_CHECKING:
    from engines.prepare.store import WeightStore

SIDES = ("incumbent", "candidate", "reference")
BASELINES = ("eager-no-grad", "compiled")
"""The module called as users call it, under no_grad; and by one line of torch.compile."""
HALVES = (torch.bfloat16, torch.float16)


class ModuleProgram:
    """`engines.program.Program` for one module, on a CPU or a GPU (the latter not tried)."""

    def __init__(self) -> None:
        self._sides: dict[str, ModuleSide] = {}
        self._baselines: dict[str, ModuleSide] = {}
        self._table: SlotTable | None = None
        self._born: dict[str, int] = {}

    def load(
        self,
        model: ModelRef,
        weights: WeightStore,
        cuts: Sequence[tuple[int, ...]],
        device: str,
        threads: int,
        plan: KvPlan,
    ) -> dict[str, float]:
        """`cuts` has one entry: a module is served whole. Returns ms by phase."""
        start = time.perf_counter()
        torch.set_num_threads(threads)
        self._plan, self._threads, self._device = plan, threads, torch.device(device)
        self._epoch = weights.epoch
        self._sweep = Sweep(self._device)
        facts = module_facts(model)
        self._examples, self._constants = facts.examples, constants_of(model)
        self._judged = model.vocab_size
        self._tree, _ = run_recipe(facts.recipe)
        self._tree.to(self._device)
        built = time.perf_counter()
        assign_tensors(self._tree, weights, self._device)
        assigned = time.perf_counter()
        for name in SIDES[:2]:
            self._sides[name] = self._new_side(name)
        self._probe = self._new_side("probe")
        skeleton = time.perf_counter()
        self._born = fingerprint.watched_callables(self._classes())
        fingerprint.start_worker_threads(max(threads, usable_cores()), threads)
        self._probe_digest(self._probe)
        return {
            "skeleton": (built - start + skeleton - assigned) * 1e3,
            "weights": (assigned - built) * 1e3,
            "warm-up": (time.perf_counter() - skeleton) * 1e3,
        }

    def slots(self) -> SlotTable:
        if self._table is None:
            self._table = slots.slot_table(self._tree)
        return self._table

    def reference_source(self, slot: str) -> str:
        """Source of the class that a slot stands for."""
        return slots.reference_source(self._tree, slot)

    def part_template(self, slot: str) -> str:
        """A runnable part that does what the reference does at a slot, to start from."""
        return slots.part_template(self._tree, slot)

    def install(
        self,
        side: str,
        candidate: Candidate,
        artefacts: Artefacts,
        cut: int,
        rows: Sequence[int] | None = None,
    ) -> ReloadReport:
        """Raises CandidateFailed."""
        self._baselines.pop(side, None)
        target = self._loaded(side)
        self._take_off(target)
        return install(target, candidate, artefacts, self.slots(), lambda dtype: target.kv, rows)

    def install_baseline(self, side: str, name: str, cut: int) -> dict[str, float]:
        """One of `BASELINES` on a side until its next install or uninstall. Returns ms by phase."""
        if name not in BASELINES:
            raise InputError("baseline", name, "is not known", nearest(name, list(BASELINES)))
        start = time.perf_counter()
        self._take_off(self._loaded(side))
        made = self._new_side(side)
        made.forward = _compiled(made.net.model) if name == "compiled" else _without_gradients(made.net.model)
        self._baselines[side] = made
        return {"skeleton": (time.perf_counter() - start) * 1e3}

    def uninstall(self, side: str) -> None:
        """Raises CandidateFailed when a part's close fails; the side is as loaded even then."""
        self._baselines.pop(side, None)
        if side in self._sides:
            self._take_off(self._sides[side])
        torch.set_num_threads(self._threads)
        return_freed_memory()
        settle(self._device)

    def compute_contexts(self, cut: int, row: int, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty(0, dtype=torch.int64) for _ in tokens]

    def load_contexts(self, side: str, cut: int, row: int, contexts: Sequence[torch.Tensor]) -> None:
        """A module has none."""

    def run_window(self, side: str, cut: int, row: int, inputs: WindowInputs, out: torch.Tensor) -> WindowReply:
        reply = run_window(self._side(side), row, inputs, out)
        self._sweep()
        return reply

    def echo(self, side: str, cut: int | None) -> Echo:
        return Echo(candidate_id=self._loaded(side).candidate.id, epoch=self._epoch)

    def replay(
        self, side: str, requests: Sequence[ReplayRequest], concurrency: int, emit: Callable[[StepEvent], None]
    ) -> Mapping[str, int]:
        """Calls one after the other, each request's tokens being the seeds of its inputs. Raises CandidateFailed."""
        target = self._side(side)
        target.activate()
        target.reset_counts()
        drawn = [seeded_step(self._examples, seed) for request in requests for seed in request.tokens[:1]]
        start = time.perf_counter()
        for step, (request, (row, words)) in enumerate(zip(requests, drawn, strict=True)):
            item = self._examples[row]
            best = int(self._first(target, row, torch.from_numpy(words)).argmax())
            event = StepEvent(
                step=step,
                finished_tokens=((request.request_id, best),) * request.output_tokens,
                phase="forward",
                num_seqs=item.batch,
                query_tokens=item.batch * item.length,
                child_seconds=time.perf_counter() - start,
            )
            emit(event)
        return target.counts()

    def generate(self, side: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """A module makes no text: for each prompt the places of the largest values in its answers to inputs that the prompt seeds."""
        target = self._side(side)
        target.activate()
        return [[self._served(target, [*prompt, index]) for index in range(max_tokens)] for prompt in prompts]

    def score(self, side: str, cut: int, tokens: Sequence[int], out: torch.Tensor) -> None:
        """`tokens` are seeds; of each the first item's answer, as far as `out` is wide."""
        target = self._side(side)
        target.activate()
        target.reset_counts()
        for index, seed in enumerate(tokens):
            self._write_answer(target, seed, out[index])

    def answer_from_kv(self, side: str, cut: int, row: int, tokens: Sequence[int], out: torch.Tensor) -> bool:
        return False

    def logits_at(
        self, side: str, cut: int, tokens: Sequence[int], positions: Sequence[int], out: torch.Tensor
    ) -> None:
        """The first token is the seed of a served call; its answer at every position."""
        target = self._side(side)
        target.activate()
        for index in range(len(positions)):
            self._write_answer(target, tokens[0], out[index])

    def profile(
        self, side: str, cut: int, row: int, slots: Sequence[str], tokens: torch.Tensor
    ) -> tuple[dict[str, Any], bytes]:
        """Figures of a row and its Chrome trace (`engines.decoder.observed`), for a child that is discarded afterwards."""
        from engines.decoder.observed import profile_row

        try:
            return profile_row(self._side(side), self._loaded("incumbent"), slots, row, tokens)
        except (Exception, SystemExit) as error:
            raise as_failure(error) from None

    def state(self) -> Mapping[str, str]:
        """Random numbers and the environment are a candidate's own business while it is installed."""
        flags = {**fingerprint.flags(self._born, self._classes()), "trees": self._changed_trees()}
        return {name: value for name, value in flags.items() if name not in ("random", "environment")}

    def fingerprint(self, whole: bool = False) -> Fingerprint:
        """The probe's tree and every tree that has nothing installed must agree bit for bit."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        free = [side for side in self._sides.values() if side.installed is None and side.name != "reference"]
        digests = {self._probe_digest(side) for side in (self._probe, *free)}
        torch.set_num_threads(threads)
        return Fingerprint(
            probes={"module": " ".join(sorted(digests))},
            flags={**fingerprint.flags(self._born, self._classes()), "trees": self._changed_trees()},
            threads_alive=fingerprint.threads_alive(),
            children_alive=fingerprint.children_alive(),
            resident_bytes=fingerprint.resident_bytes(),
            open_files=fingerprint.open_files(),
            device_bytes=allocated_bytes(self._device),
        )

    def _served(self, target: ModuleSide, prompt: Sequence[int]) -> int:
        seed = int(content_hash(list(prompt))[:15], 16)
        row, words = seeded_step(self._examples, seed)
        return int(self._first(target, row, torch.from_numpy(words)).argmax())

    def _write_answer(self, target: ModuleSide, seed: int, out: torch.Tensor) -> None:
        """What is missing to the width of `out` is the least value, so that it is never the largest."""
        row, words = seeded_step(self._examples, seed)
        answer = self._first(target, row, torch.from_numpy(words))[: out.shape[0]]
        out.fill_(float(answer.min()))
        out[: len(answer)].copy_(answer)

    def _first(self, target: ModuleSide, row: int, words: torch.Tensor) -> torch.Tensor:
        """The first item's answer, as far as it is judged."""
        try:
            with torch.inference_mode():
                return target.run(target.row_batch(row, 0, words))[0, : self._judged]
        except (Exception, SystemExit) as error:
            if target.installed is None:
                raise
            raise as_failure(error) from None

    def _probe_digest(self, side: DecoderSide) -> str:
        """On the smallest example, zeros or the like."""
        row = min(range(len(self._examples)), key=lambda index: self._examples[index].flops)
        with torch.inference_mode():
            words = side.blank_step(row)
            args = side.row_batch(row, 0, words)
            return fingerprint.logits_digest([side.run(args)])

    def _take_off(self, side: ModuleSide) -> None:
        try:
            side.uninstall()
        except (Exception, SystemExit) as error:
            raise failed_by(error, FailureKind.EXCEPTION, "a part does not close") from None

    def _side(self, name: str) -> ModuleSide:
        return self._baselines.get(name) or self._loaded(name)

    def _loaded(self, name: str) -> ModuleSide:
        if name not in SIDES:
            raise InputError("side", name, "is not a side", f"use one of {list(SIDES)}")
        if name not in self._sides:
            self._sides[name] = self._new_side(name)
        return self._sides[name]

    def _new_side(self, name: str) -> ModuleSide:
        """The reference of a module in half precision computes in float32, from the same values."""
        tree, examples, constants = cloned(self._tree), self._examples, self._constants
        if name == "reference" and any(tensor.dtype in HALVES for tensor in tree.parameters()):
            tree.float()
            examples = tuple(widened(example) for example in examples)
            constants = {key: tensor.float() if tensor.dtype in HALVES else tensor for key, tensor in constants.items()}
        return ModuleSide(name, tree, examples, constants, self._plan, self._threads, self._device)

    def _classes(self) -> set[type]:
        return {type(module) for module in self._tree.modules()}

    def _changed_trees(self) -> str:
        trees = {**self._sides, "probe": self._probe}
        changed = [name for name, side in trees.items() if side.installed is None and side.structure() != side.born]
        return ", ".join(sorted(changed))


def _without_gradients(model: torch.nn.Module) -> Callable[..., Any]:
    """Calls as most users write them: no_grad, not inference mode."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return model(*args, **kwargs)

    return forward


def _compiled(model: torch.nn.Module) -> Callable[..., Any]:
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    compiled: Callable[..., Any] = torch.compile(model, dynamic=False)
    return compiled
