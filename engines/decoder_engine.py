"""The decoder engine: Hugging Face causal language models in processes that stay up while candidates come and go.

    DecoderEngine ── resolves once (threads, cuts, slots for serving, sources of text) ──► Stable (processes) + Judge (assignments)

Usable in a plain Python process, without Ray: load it, ask it, close it, or use it in a `with` statement. It is not thread-safe: one
caller at a time. What a candidate does wrong is in the results; only inputs and the machine raise.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from engines.client import Child, token_bytes
from engines.cuts import choose_cuts
from engines.heap import available_bytes, total_bytes
from engines.judge.attempt import Judge
from engines.judge.baselines import BASELINE_NAMES, measure_baseline
from engines.judge.device import in_words, measured
from engines.judge.inputs import SourceMaker
from engines.judge.install import Builder, Installer
from engines.judge.reloads import prove_reload
from engines.judge.scoring import reference_noise, score_texts
from engines.judge.texts import RequestMaker, text_sources
from engines.limits import ChildLimits
from engines.profile import profile
from engines.program import CandidateFailed, ReplayRequest
from engines.stable import Recipe, Stable, machine_fault
from engines.threading_env import environment_record, usable_cores
from hotpass.errors import EngineDied, InputError
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment, ModelRef
from hotpass.records.measurement import (
    Agreement,
    Assignment,
    BaselineMeasurement,
    Environment,
    Failure,
    FailureKind,
    MeasureResult,
    OutputCheck,
    ReloadProof,
    ReloadReport,
    Side,
    Tier,
)
from hotpass.records.profile import Profile
from hotpass.records.shapes import ShapeRow
from hotpass.records.slots import SlotTable

T = TypeVar("T")

DECODER = "engines.decoder.program:DecoderProgram"

CALL_SECONDS = 120.0
"""Deadline of install, generate and restore when called by themselves."""


class DecoderEngine:
    """Implements `engines.protocol.Engine` and `engines.protocol.MeasuresBaselines`."""

    def __init__(
        self,
        name: str = "decoder-0",
        *,
        device: str = "",
        threads: int | None = None,
        seed: int = 0,
        traffic: str = "",
        cache_dir: str = "",
        builder: Builder | None = None,
        sources: SourceMaker | None = None,
        requests: RequestMaker | None = None,
        program: str = DECODER,
        search_path: Sequence[str] = (),
        limits: ChildLimits | None = None,
        narrowest_bits: float = 4.5,
        serving_context: int | None = None,
        pool_sets: int = 4,
        window_ms: float = 20.0,
        aa_seconds: float = 4.0,
        audited_share: float = 0.05,
        room_bytes: int | None = None,
    ) -> None:
        """`device`: `cpu` or `cuda`, the deployment's by default. `threads`: physical cores by default. `seed`: of contexts and pool.

        `traffic`: path or preset that the slow tier replays (default: the deployment's name for it); `requests` gives them directly.
        `builder` compiles native files and derives weights (default: `engines.build`, which keeps them in `cache_dir`, the user's cache
        by default). `sources`: text for inputs (default: the bundled corpus through the model's tokenizer, random tokens without one). `narrowest_bits`: of a weight
        in any candidate that will come, which sets how deep the fast tier's cuts are. `serving_context`: longest sequence that can be
        served (default: 2048 or the model's). `pool_sets`: input sets with known references, a row. `window_ms`: shortest window of as
        loaded. `aa_seconds`: time for A/A at the birth of a child. `audited_share`: of the search's attempts, drawn by chance, after
        which the reload is proven against a cold one and the weights are hashed. `room_bytes`: for the derived weights of both sides,
        which alternate where these do not fit (default: memory that is available when they are measured, on a CPU).
        """
        self.name = name
        self._device, self._seed, self._traffic = device, seed, traffic
        self._builder, self._cache_dir = builder, cache_dir
        self._sources = sources
        self._requests = requests
        self._threads = threads or usable_cores()
        self._program = program
        self._search_path = tuple(search_path)
        self._limits = limits
        self._narrowest_bits = narrowest_bits
        self._serving_context = serving_context
        self._pool_sets = pool_sets
        self._window_seconds = window_ms / 1e3
        self._aa_seconds = aa_seconds
        self._audited_share = audited_share
        self._room_bytes = room_bytes
        self._stable: Stable | None = None
        self._deployment: Deployment
        self._judge: Judge
        self._installer: Installer
        self._environment: Environment

    def __enter__(self) -> DecoderEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, deployment: Deployment, tier: Tier = Tier.FAST) -> Mapping[str, float]:
        """Load once. Tier `fast` can measure both tiers, `slow` only the whole model's replays. Returns ms by phase.

        Raises MachineError when a process cannot do its part, InputError for a deployment that cannot be served.
        """
        self.close()
        start = time.perf_counter()
        cuts = self._cuts(deployment, tier)
        recipe = self._recipe(deployment, cuts)
        stable = self._new_stable(recipe)
        try:
            stable.load()
        except BaseException:
            stable.close()
            raise
        self._stable, self._deployment = stable, deployment
        self._environment = self._environment_record(recipe.threads)
        self._installer = Installer(stable, self._builder or self._default_builder(deployment, cuts))
        whole = len(cuts) - 1
        self._judge = Judge(
            name=self.name,
            stable=stable,
            installer=self._installer,
            environment=self._environment,
            fast_cuts=range(whole) if len(cuts) > 1 else [0],
            whole_cut=whole,
            concurrency=deployment.concurrency,
            output_tokens_per_step=deployment.shapes.output_tokens_per_step,
            audited_share=self._audited_share,
            room_bytes=self._room,
        )
        stable.noise_abs = self._measured_noise()
        stable.discard_reference()  # its memory is worth more than the second that another one costs
        stable.phases_ms["total"] = (time.perf_counter() - start) * 1e3
        return dict(stable.phases_ms)

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each cut that is loaded; the last is the whole model."""
        return self._loaded.recipe.cuts

    @property
    def facts(self) -> Mapping[str, str]:
        """What the machine permitted: `network` is `none`, or says why children could not be cut off; `processes` says what holds the
        number of theirs; `unconfined` is
        `nothing`, or what of files, memory and signals of other processes is in a child's reach."""
        return dict(self._loaded.facts)

    @property
    def environment(self) -> Environment:
        return self._environment

    def slots(self) -> SlotTable:
        with machine_fault("the slot table"):
            return self._pair_child().call_record("slots", None, SlotTable, deadline=_soon())

    def install(self, side: Side, candidate: Candidate) -> ReloadReport:
        """Put a candidate on a side of the pair child, on every cut. Raises CandidateFailed; then the child has been replaced."""
        stable = self._loaded
        places = stable.places(range(len(self.cuts)))
        return self._or_discard(lambda: self._installer.install(self._pair_child(), side, candidate, places, _soon()))

    def measure(self, assignment: Assignment) -> MeasureResult:
        """Install both, measure, restore, prove clean. A candidate's fault is in the result."""
        self._check(assignment)
        requests: Sequence[ReplayRequest] = ()
        if assignment.tier is Tier.SLOW:
            requests = self._replayed(assignment)
        return measured(self._loaded, lambda: self._judge.measure(assignment, requests))

    def generate(self, side: Side, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Greedy continuation by what is installed on a side. Raises CandidateFailed."""
        body = {"side": side.value, "lengths": [len(prompt) for prompt in prompts], "max_tokens": max_tokens}
        blob = token_bytes([token for prompt in prompts for token in prompt])
        child = self._pair_child()
        return self._or_discard(
            lambda: child.call_record("generate", body, list[list[int]], deadline=_soon(), blob=blob)
        )

    def restore(self) -> None:
        """Both sides as loaded; a child that cannot be restored, or that wrote to a GPU's weights, is replaced."""
        child = self._pair_child()
        try:
            with self._weights_kept():
                for side in Side:
                    self._installer.uninstall(child, side, _soon())
        except CandidateFailed:
            self._loaded.discard_pair()

    def renew(self) -> None:
        """Replace the pair child by a new one, as after a candidate that was not left clean. The weights stay where they are."""
        self._loaded.discard_pair()
        self._loaded.pair()

    def baselines(self) -> Sequence[str]:
        """Names that `measure_baseline` takes."""
        return BASELINE_NAMES

    def measure_baseline(
        self, name: str, rows: Sequence[ShapeRow], seed: int, deadline_seconds: float
    ) -> BaselineMeasurement:
        """A baseline of transformers, paired with as loaded on the whole model by the same windows."""
        if name not in BASELINE_NAMES:
            raise InputError("baseline", name, "is not known", f"use one of {list(BASELINE_NAMES)}")
        places = [(len(self.cuts) - 1, self._row_index(row)) for row in rows]
        return measure_baseline(self._loaded, self._environment, name, places, seed, deadline_seconds)

    def score(self, candidate: Candidate, texts: int, tokens_per_text: int, seed: int, noise_abs: float) -> Agreement:
        """Agreement with the reference on held-out text, in a fresh child. Raises CandidateFailed."""
        with self._weights_kept():
            return score_texts(
                self._loaded, self._installer, candidate, len(self.cuts) - 1, (texts, tokens_per_text), seed, noise_abs
            )

    def reference_noise(self) -> Sequence[OutputCheck]:
        """The reference against itself with another number of threads, on the pool."""
        return self._noise_checks

    def verify_weights(self) -> bool:
        """Full hash of the keeper's memory against the one at load."""
        return self._loaded.weights_hold()

    def verify_reload(self, before: Candidate, candidate: Candidate) -> ReloadProof:
        """Whether the candidate put over `before` answers as it does cold, and `before` comes back. Raises CandidateFailed."""
        with self._weights_kept():
            return prove_reload(self._loaded, self._installer, before, candidate)

    def profile(self, assignment: Assignment, trace_path: str = "") -> Profile:
        """Where the time of the assignment's candidate goes, on its rows of the whole model, in a child of its own."""
        self._check(assignment)
        try:
            return profile(
                self._loaded, self._installer, assignment, engine=self.name, table=self.slots(),
                hardware=self._deployment.hardware, cut=len(self.cuts) - 1, trace_path=trace_path,
            )  # fmt: skip
        finally:
            if self._loaded.written_on_device().written:  # its own child is gone; the pair child has seen them
                self._loaded.discard_pair()

    def close(self) -> None:
        """End every process and release every descriptor; the engine can be loaded again."""
        if self._stable is not None:
            self._stable.close()
            self._stable = None

    @property
    def _loaded(self) -> Stable:
        if self._stable is None:
            raise EngineDied(f"{self.name} is not loaded")
        return self._stable

    def _pair_child(self) -> Child:
        return self._loaded.pair().child

    def _or_discard(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except CandidateFailed:
            self._loaded.discard_pair()
            raise

    @contextlib.contextmanager
    def _weights_kept(self) -> Iterator[None]:
        """A candidate that wrote to the weights on a GPU has failed; they are as they were afterwards, whatever happened."""
        written: Sequence[str] = ()
        try:
            yield
        finally:
            written = self._loaded.written_on_device().written
            if written:
                self._loaded.discard_pair()
        if written:
            raise CandidateFailed(Failure(kind=FailureKind.PROTOCOL, message=in_words(written)))

    def _default_builder(self, deployment: Deployment, cuts: Sequence[tuple[int, ...]]) -> Builder:
        from engines.build import CandidateBuilder

        return CandidateBuilder(deployment.model, cuts, cache_dir=self._cache_dir or None, threads=self._threads)

    def _measured_noise(self) -> float:
        """The largest difference of the reference from itself; at least the grain of fp32 sums."""
        with machine_fault("the reference's noise"):
            self._noise_checks = reference_noise(self._loaded)
        return max((check.max_abs for check in self._noise_checks), default=0.0)

    def _cuts(self, deployment: Deployment, tier: Tier) -> tuple[tuple[int, ...], ...]:
        whole = tuple(range(deployment.model.num_layers))
        if tier is Tier.SLOW:
            return (whole,)
        return choose_cuts(deployment.model, deployment.hardware.last_level_cache_bytes, self._narrowest_bits)

    def _environment_record(self, threads: int) -> Environment:
        return environment_record(self._deployment.hardware.id, threads, _compiler_version())

    def _new_stable(self, recipe: Recipe) -> Stable:
        return Stable(recipe)

    def _recipe(self, deployment: Deployment, cuts: tuple[tuple[int, ...], ...]) -> Recipe:
        model = deployment.model
        family = json.loads((Path(model.folder) / "config.json").read_text()).get("model_type", "")
        device = self._device or deployment.hardware.device
        context = self._serving_context or served_context(model)
        return Recipe(
            program=self._program,
            preload=(),
            preload_optional=(f"transformers.models.{family}.modeling_{family}",) if self._program == DECODER else (),
            search_path=self._search_path,
            model=model,
            device=device,
            threads=self._threads,
            cuts=cuts,
            rows=deployment.shapes.rows,
            serving_slots=deployment.concurrency,
            serving_context=context,
            widths=(),
            limits=self._limits or default_limits(device),
            sources=self._sources or text_sources(model),
            seed=self._seed,
            pool_sets=self._pool_sets,
            window_seconds=self._window_seconds,
            aa_seconds=self._aa_seconds,
        )

    def _check(self, assignment: Assignment) -> None:
        for row in assignment.rows:
            self._row_index(row)
        if not assignment.rows:
            raise InputError("assignment", "rows", "is empty", "name at least one row of the shape table")
        if assignment.deadline_seconds <= 0:
            raise InputError("deadline_seconds", assignment.deadline_seconds, "is not positive", "give seconds")

    def _room(self) -> int:
        """Memory that derived weights may take: what is free, and what the keeper holds of them already. Device memory is not counted:
        on a GPU whoever knows it says so."""
        if self._room_bytes is not None:
            return self._room_bytes
        return available_bytes() + self._loaded.keeper.derived_bytes

    def _row_index(self, row: ShapeRow) -> int:
        keys = [item.key for item in self._loaded.recipe.rows]
        if row.key not in keys:
            raise InputError(
                "row", row.key, "is not in the shape table that the engine was loaded with", f"use one of {keys}"
            )
        return keys.index(row.key)

    def _replayed(self, assignment: Assignment) -> Sequence[ReplayRequest]:
        if self._requests is None:
            raise InputError(
                "requests", None, "are not known to this engine", "construct it with the traffic's requests"
            )
        count = assignment.replay_requests or max(64, 4 * self._deployment.concurrency)
        limit = self._loaded.recipe.serving_context
        made = self._requests(count, assignment.seed, assignment.purpose == "cold")
        fitting = [item for item in made if len(item.tokens) + item.output_tokens <= limit]
        if not fitting:
            raise InputError("requests", len(made), f"do not fit {limit} tokens", "raise serving_context")
        return fitting


def served_context(model: ModelRef) -> int:
    """Longest sequence that an engine serves unless it is told another."""
    return min(2048, model.max_context)


def _compiler_version() -> str:
    from engines.build import find_compiler

    compiler = find_compiler()
    return compiler.version if compiler is not None else ""


def default_limits(device: str) -> ChildLimits:
    """Of children: four fifths of the machine's memory on a CPU. Drivers of a GPU reserve more than there is, so none there."""
    memory = 0 if device != "cpu" else total_bytes() * 4 // 5
    return ChildLimits(memory_bytes=memory)


def _soon() -> float:
    return time.monotonic() + CALL_SECONDS
