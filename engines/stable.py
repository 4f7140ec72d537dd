"""The processes of a loaded engine, and what their birth established: contexts, references, calibration, A/A.

    keeper ─ weights fd ─┐
    zygote ─ fork ───────┴─► calibrating child ─► steps a window
                             reference child ──► contexts and references of the pool
                             pair child ───────► contexts loaded, A/A, fingerprint: ready for candidates
                             fresh children ───► one a side, for cold pairs

Children are cheap and mortal; keeper and contexts are not. What a birth cannot do is the machine's fault (MachineError), since no
candidate is near it. What is measured with these processes is `judge.attempt`'s business.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from engines.client import Child
from engines.cuda.conditions import Conditions, GpuMonitor
from engines.cuda.region import DeviceCheck, DeviceWeights
from engines.held_folder import ENGINE, HeldFolder
from engines.judge.contexts import Contexts
from engines.judge.inputs import InputSet, SourceMaker, TokenSource, drawer, seed_of, window_tokens
from engines.judge.pairing import Pair, SideBySide
from engines.judge.rounds import Evidence, Place, Plan, Rounds
from engines.judge.rows import PROMPT_PHASES, brief_rows, late_rows
from engines.judge.windows import run_window
from engines.keeper import Keeper, KeptWeights
from engines.limits import ChildLimits
from engines.program import CandidateFailed, Fingerprint, KvPlan
from engines.stopwatch import Stopwatch
from engines.threading_env import process_environment
from engines.zygote import Zygote
from hotpass.errors import MachineError
from hotpass.records.candidate import AS_LOADED
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import Side
from hotpass.records.shapes import ShapeRow

BIRTH_SECONDS = 600.0
"""Deadline of anything that a birth does: generous, since a birth that fails is fatal."""

MAX_STEPS = 64
"""Steps of a window at most."""

LEAST_DECODE_STEPS = 2
"""Steps of any other row's window at least: a candidate may be ten times as fast as what was calibrated on."""

MAX_WINDOW_BYTES = 1 << 26
"""Answers of a window at most, and its inputs at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What an engine's processes are made of; everything resolved."""

    program: str
    """`package.module:Class` of the Program."""
    preload: tuple[str, ...]
    """Modules that the zygote must import."""
    preload_optional: tuple[str, ...]
    """Modules that it imports where they exist."""
    search_path: tuple[str, ...]
    model: ModelRef
    device: str
    threads: int
    cuts: tuple[tuple[int, ...], ...]
    rows: tuple[ShapeRow, ...]
    serving_slots: int
    serving_context: int
    widths: tuple[int, ...]
    """As in `KvPlan`."""
    limits: ChildLimits
    sources: SourceMaker
    seed: int
    """Of contexts, pool and A/A."""
    pool_sets: int
    window_seconds: float
    """A window of as loaded is at least so long."""
    aa_seconds: float
    """Time for A/A at the birth of the first pair child; a third of it when a child is replaced."""


@dataclass(kw_only=True, slots=True)
class PairChild:
    """A child that holds both sides, and what it was at birth."""

    child: Child
    fingerprint: Fingerprint
    mappings: tuple[tuple[str, ...], ...]
    """Where it maps the weights, seen from outside."""
    noise_floor: float
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    """What its birth took: `fork`, `context`, `weights`, `skeleton`, `kv`, `warm-up`, `contexts`, `first result` (its first window),
    `answers` (the further ones that are known of as loaded), `a against a`, and `until first result` since the fork."""
    beside_itself: dict[tuple[str, Place], deque[float]] = field(default_factory=dict)
    """(incumbent id, place) → recent seconds a step without a candidate beside it."""
    told: bool = False
    """Whether a result has said what the birth took."""

    def birth_ms(self) -> dict[str, float]:
        """Phases of the birth as a result tells them: once, with the first one that the child had a part in."""
        told, self.told = self.told, True
        return {} if told else born(self.phases_ms)


def born(phases_ms: Mapping[str, float]) -> dict[str, float]:
    """Phases of a child's birth among those of a measurement."""
    return {f"birth/{name}": ms for name, ms in phases_ms.items()}


@contextlib.contextmanager
def machine_fault(what: str) -> Iterator[None]:
    """A failure where no candidate is near is the machine's."""
    try:
        yield
    except CandidateFailed as error:
        detail = error.failure.detail[-1500:]
        raise MachineError(f"{what}: {error.failure.kind}: {error.failure.message}\n{detail}".strip()) from None


class Stable:
    """Keeper, zygote, children. Everything in it ends with `close`."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.phases_ms: dict[str, float] = {}
        self.pool: dict[Place, list[InputSet]] = {}
        self.brief_rows: frozenset[int] = frozenset()
        """Rows with a window a side and round, instead of two."""
        self.late_rows: frozenset[int] = frozenset()
        """Rows that a search measures only where the others do not give a candidate up."""
        self.noise_abs = 0.0
        self.facts: dict[str, str] = {}
        self._contexts: Contexts | None = None
        self._pair: PairChild | None = None
        self._reference: Child | None = None
        self._monitor: GpuMonitor | None = None
        self._conditions: Conditions | None = None
        self._births = 0
        self._folder = HeldFolder(ENGINE)
        """Holds the children's folders, those of a zygote that died included."""
        own = {"TMPDIR": str(self._folder.path)}
        self._environment = process_environment(recipe.threads, recipe.search_path) | own
        self.keeper = Keeper(self._environment)
        try:
            self.zygote = Zygote(self._environment)
        except BaseException:
            self.keeper.close()
            self._folder.close()
            raise
        self.weights: KeptWeights
        self.on_device: DeviceWeights | None = None
        """The weights in a GPU's memory; None on a CPU."""
        self.kv: KvPlan

    def load(self) -> None:
        """Weights, calibration, contexts, references, first pair child. Raises MachineError."""
        self.keeper.begin_load(self.recipe.model)  # while the zygote imports
        with self._phase("import"):
            self._prepare_zygote()
        with self._phase("keep"):
            self.weights = self.keeper.finish_load()
        self.phases_ms.update(self.weights.phases_ms)
        if self.recipe.device != "cpu":
            with self._phase("place"):
                self.on_device = self.keeper.place_on(self.recipe.device)
            self._monitor = GpuMonitor()
            self.phases_ms.update(self.on_device.phases_ms)
        with self._phase("calibrate"), machine_fault("calibration"):
            self.kv = self._calibrated()
        with self._phase("references"), machine_fault("the reference child"):
            self._compute_references()
        with self._phase("pair"):
            self.pair()

    def pair(self) -> PairChild:
        """The pair child; born now if there is none. Raises MachineError."""
        if self._pair is None:
            with machine_fault("the pair child's birth"):
                self._pair = self._born_pair()
        return self._pair

    def discard_pair(self) -> None:
        """The pair child is not to be used again."""
        if self._pair is not None:
            self._pair.child.close()
            self._pair = None

    def revive_zygote(self) -> None:
        """After the zygote's death: a new one; the weights are still the keeper's. Raises EngineDied when the keeper is gone, too."""
        self.discard_pair()
        self.discard_reference()
        self.zygote.close()
        for left in self._folder.path.iterdir():
            shutil.rmtree(left, ignore_errors=True)
        self.zygote = Zygote(self._environment)
        self._prepare_zygote()

    def fresh_child(self, kv: KvPlan | None = None, threads: int | None = None, *, trusted: bool = False) -> Child:
        """A new child with the program loaded and contexts at hand. The caller closes it. Raises CandidateFailed, EngineDied.

        A trusted child never sees a candidate, and has no limits of memory and files: contexts are large.
        """
        plan = kv if kv is not None else self.kv
        limits = replace(self.recipe.limits, memory_bytes=0, file_bytes=0) if trusted else self.recipe.limits
        zygote, program = self._home(trusted)
        child = Child(zygote, program, limits, _buffer_floats(plan, self.recipe.model))
        try:
            self.facts.update(child.facts)
            start = time.perf_counter()
            body = {
                "model": self.recipe.model,
                "index": self.weights.memory.index,
                "formats": self.weights.formats,
                "on_device": self.on_device,
                "cuts": self.recipe.cuts,
                "device": self.recipe.device,
                "threads": threads or self.recipe.threads,
                "plan": plan,
                "epoch": self.weights.sha256,
            }
            child.epoch = self.weights.sha256
            phases = child.call_record(
                "load", body, dict[str, float], deadline=_soon(), fds=(self.weights.memory.fd, child.out.fd)
            )
            child.phases_ms.update(phases)
            child.phases_ms["load"] = (time.perf_counter() - start) * 1e3
            if self.on_device is not None:
                self.facts["weights"] = str(child.call_plain("weights_from", deadline=_soon()))
            if self._contexts is not None:
                self._contexts.hand_to(child, _soon())
        except BaseException:
            child.close()
            raise
        return child

    def load_contexts(self, child: Child, side: str, places: Sequence[Place], deadline: float) -> None:
        """Copy the reference's KV into a side's slots of those rows."""
        assert self._contexts is not None, "computed before any child needs them"
        self._contexts.load(child, side, places, deadline)

    def reference(self) -> Child:
        """The reference child, with contexts loaded; born again if it died. Raises CandidateFailed."""
        if self._reference is None or not self._reference.alive:
            self.discard_reference()
            self._reference = self.fresh_child(trusted=True)
            self.load_contexts(self._reference, "reference", list(self.pool), _soon())
        return self._reference

    def discard_reference(self) -> None:
        if self._reference is not None:
            self._reference.close()
            self._reference = None

    def plan(
        self,
        places: Sequence[Place],
        source: TokenSource,
        rng: random.Random,
        *,
        pool: Mapping[Place, Sequence[InputSet]] | None = None,
        incumbent_is_loaded: bool = True,
    ) -> Plan:
        """What to measure in one attempt: sets of a pool (this engine's) in the generator's order, then fresh ones of the source."""
        sets = self.pool if pool is None else pool
        return Plan(
            kv=self.kv,
            depths={cut: len(layers) for cut, layers in enumerate(self.recipe.cuts)},
            places=places,
            drawers={
                place: drawer(sets.get(place, ()), partial(window_tokens, source, self.kv, place[1]), rng)
                for place in places
            },
            noise_abs=self.noise_abs,
            incumbent_is_loaded=incumbent_is_loaded,
            brief_rows=self.brief_rows,
            slowed=self._conditions.slowed if self._conditions is not None else tuple,
        )

    def held_out_sets(self, places: Sequence[Place], seed: int) -> dict[Place, list[InputSet]]:
        """Input sets from held-out text with the reference's answers, for one measurement. Raises CandidateFailed."""
        source = self.recipe.sources(seed_of(seed, "held out"), True)
        reference = self.reference()
        sets = {
            place: [self._referenced(reference, place, source) for _ in range(self._num_sets(place[1]))]
            for place in places
        }
        self.discard_reference()
        return sets

    def note_loaded(self, child: Child, sets: Mapping[Place, Sequence[InputSet]]) -> None:
        """What as loaded answers to input sets, for comparisons bit for bit; by the incumbent's side before anything is installed."""
        for place, items in sets.items():
            for item in items:
                if item.loaded is None:
                    item.loaded = self._untimed(child, "incumbent", place, item.tokens)

    def weights_hold(self) -> bool:
        """Full hash of the keeper's memory against the one at load, and the device's against what was put there."""
        return self.keeper.hash_weights() == self.weights.sha256 and not self.written_on_device().written

    def written_on_device(self) -> DeviceCheck:
        """What somebody has written to among the weights on the device; it is as it was again. Nothing on a CPU, whose weights are
        sealed. Raises MachineError when the memory does not hold."""
        if self.on_device is None:
            return DeviceCheck(written=(), check_ms=0.0, reload_ms=0.0)
        return self.keeper.check_device()

    def watch_conditions(self) -> Conditions:
        """Note from now on, between rounds, what the GPU does. Only where weights are on one."""
        assert self._monitor is not None, "made as the weights were placed"
        self._conditions = Conditions(sample=self._monitor.sample)
        return self._conditions

    def monitored_bytes(self, pid: int) -> int | None:
        """Device memory of a process by the driver's count; None where it is not told."""
        return self._monitor.process_bytes(pid) if self._monitor is not None else None

    def places(self, cuts: Sequence[int]) -> list[Place]:
        """Every row of those cuts."""
        return [(cut, row) for cut in cuts for row in range(len(self.recipe.rows))]

    def close(self) -> None:
        """End every process, close every descriptor."""
        self.discard_pair()
        self.discard_reference()
        if self._contexts is not None:
            self._contexts.close()
            self._contexts = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self.zygote.close()
        self.keeper.close()
        self._folder.close()

    def _home(self, trusted: bool) -> tuple[Zygote, str]:
        """Where a child is forked, and the program that it runs."""
        return self.zygote, self.recipe.program

    def _calibrating(self, kv: KvPlan) -> contextlib.AbstractContextManager[Child]:
        """The child whose steps are timed to choose how many a window has."""
        return self.fresh_child(kv, trusted=True)

    def _prepare_zygote(self) -> None:
        module = self.recipe.program.partition(":")[0]
        base = ("numpy", "torch", "engines.child", "engines.memory", "engines.prepare.store", module)
        self.zygote.prepare((*base, *self.recipe.preload), self.recipe.preload_optional)

    def _plan(self, steps: Sequence[int]) -> KvPlan:
        return KvPlan(
            rows=self.recipe.rows,
            steps_per_window=tuple(steps),
            serving_slots=self.recipe.serving_slots,
            serving_context=self.recipe.serving_context,
            widths=self.recipe.widths,
        )

    def _calibrated(self) -> KvPlan:
        """Steps of each row's window so that as loaded takes at least `window_seconds` on the smallest cut."""
        vocab = self.recipe.model.vocab_size
        single = self._plan([1] * len(self.recipe.rows))
        source = self.recipe.sources(seed_of(self.recipe.seed, "calibration"), False)
        cut = min(range(len(self.recipe.cuts)), key=lambda index: len(self.recipe.cuts[index]))
        steps, step_seconds = [], []
        with self._calibrating(single) as child:
            for row, item in enumerate(self.recipe.rows):
                tokens = window_tokens(source, single, row)
                seconds = min(
                    run_window(child, "incumbent", cut, row, tokens, plan=single, vocab=vocab, deadline=_soon()).seconds
                    for _ in range(2)
                )
                step_bytes = max(item.num_seqs * single.width(row, vocab) * 4, tokens[0].nbytes)
                most = max(1, min(MAX_STEPS, MAX_WINDOW_BYTES // step_bytes))
                least = 1 if item.phase in PROMPT_PHASES else LEAST_DECODE_STEPS
                steps.append(max(least, min(most, -int(-self.recipe.window_seconds // seconds))))
                step_seconds.append(seconds)
        shares = [item.steps_share for item in self.recipe.rows]
        windows = [seconds * count for seconds, count in zip(step_seconds, steps, strict=True)]
        self.brief_rows = brief_rows(shares, step_seconds, windows)
        self.late_rows = late_rows([item.phase for item in self.recipe.rows], windows)
        return self._plan(steps)

    def _compute_references(self) -> None:
        """Contexts of every cut, then the reference's logits for the pool."""
        source = self.recipe.sources(seed_of(self.recipe.seed, "pool"), False)
        child = self._reference = self.fresh_child(trusted=True)
        self._contexts = Contexts(self.kv)
        self._contexts.compute(child, len(self.recipe.cuts), source, _soon())
        places = self.places(range(len(self.recipe.cuts)))
        self.load_contexts(child, "reference", places, _soon())
        for place in places:
            self.pool[place] = [self._referenced(child, place, source) for _ in range(self._num_sets(place[1]))]

    def _num_sets(self, row: int) -> int:
        """Fewer sets of rows whose steps are long: each costs a step in fp32."""
        prompts = self.recipe.rows[row].phase in PROMPT_PHASES
        return max(1, self.recipe.pool_sets // 2) if prompts else self.recipe.pool_sets

    def _referenced(self, child: Child, place: Place, source: TokenSource) -> InputSet:
        tokens = window_tokens(source, self.kv, place[1])
        return InputSet(tokens=tokens, reference=self._untimed(child, "reference", place, tokens))

    def _untimed(self, child: Child, side: str, place: Place, tokens: np.ndarray) -> np.ndarray:
        vocab = self.recipe.model.vocab_size
        window = run_window(child, side, *place, tokens, plan=self.kv, vocab=vocab, deadline=_soon())
        return window.logits

    def _born_pair(self) -> PairChild:
        self._births += 1
        laps = Stopwatch()
        child = self.fresh_child()
        try:
            laps.lap("child")
            places = self.places(range(len(self.recipe.cuts)))
            for side in Side:
                self.load_contexts(child, side.value, places, _soon())
            laps.lap("contexts")
            self._untimed(child, Side.INCUMBENT.value, places[0], self.pool[places[0]][0].tokens)
            laps.lap("first result")
            until_first = sum(laps.phases_ms.values())
            self.note_loaded(child, self.pool)
            laps.lap("answers")
            pair_of_one = SideBySide(child, self.kv, self.recipe.model.vocab_size)
            evidence, noise = self.a_against_a(
                pair_of_one, places, self.recipe.aa_seconds / (1 if self._births == 1 else 3)
            )
            laps.lap("a against a")
            own = {name: ms for name, ms in laps.phases_ms.items() if name != "child"}
            pair = PairChild(
                child=child,
                fingerprint=child.call_record("fingerprint", {"whole": True}, Fingerprint, deadline=_soon()),
                mappings=child.mappings([self.weights.memory.inode]),
                noise_floor=noise,
                phases_ms={**child.phases_ms, **own, "until first result": until_first},
            )
        except BaseException:
            child.close()
            raise
        for place, seconds in evidence.incumbent_seconds.items():
            pair.beside_itself[(AS_LOADED.id, place)] = deque(seconds, maxlen=8)
        return pair

    def a_against_a(
        self, pair: Pair, places: Sequence[Place], patience: float, *, held_out: bool = False
    ) -> tuple[Evidence, float]:
        """Both sides as loaded: at least one block on every place, more for as long as `patience` seconds last. The spread of the
        blocks is the noise floor. Raises CandidateFailed."""
        evidence = Evidence()
        source = self.recipe.sources(seed_of(self.recipe.seed, "aa", self._births), held_out)
        rng = random.Random(seed_of(self.recipe.seed, "aa order", self._births))
        plan = self.plan(places, source, rng, pool={})
        rounds = Rounds(pair, plan, evidence, rng)
        end = time.monotonic() + patience
        index = 0
        while index < 2 or (index < 6 and time.monotonic() < end):
            if index == 1 and time.monotonic() > end:
                break
            rounds.round(index, _soon())
            index += 1
        ratios = [block.log_ratio for block in evidence.blocks]
        return evidence, statistics.stdev(ratios) if len(ratios) > 1 else 0.0

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases_ms[name] = (time.perf_counter() - start) * 1e3


def _buffer_floats(plan: KvPlan, model: ModelRef) -> int:
    return max(
        steps * plan.rows[row].num_seqs * plan.width(row, model.vocab_size)
        for row, steps in enumerate(plan.steps_per_window)
    )


def _soon() -> float:
    return time.monotonic() + BIRTH_SECONDS
