"""The vLLM engine: a live vLLM on the CPU that stays up while parts come and go on its own module tree.

    VllmEngine ── as the decoder engine: Judge, pairs, verdicts ──► children that each hold a loaded vLLM (`engines.vllm`)

Needs a venv with vLLM (`scripts/install-vllm.sh`); one rank; the whole model on both tiers, since vLLM loads no cuts. Not tried on a GPU.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from engines.build import BuiltCandidate, build_candidate
from engines.client import Child
from engines.decoder_engine import DECODER, DecoderEngine, default_limits
from engines.judge.inputs import RandomTokens
from engines.judge.install import Builder, PartFiles
from engines.prepare.store import open_weights
from engines.stable import BIRTH_SECONDS, Recipe, Stable, machine_fault
from engines.vllm.environment import find_python, versions
from engines.vllm.folder import refuse_unserved
from engines.vllm.stable import VllmStable, llm_arguments
from engines.vllm.weights import vllm_module_names
from hotpass.errors import InputError, nearest
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment, ModelRef
from hotpass.records.measurement import BaselineMeasurement, Environment, Tier
from hotpass.records.shapes import Phase, ShapeRow
from hotpass.records.slots import SlotTable

_ONE_STEP = ShapeRow(
    phase=Phase.DECODE, num_seqs=1, query_tokens=1, context_mean=16, context_max=16, steps_share=1.0, tokens_share=1.0
)


class VllmEngine(DecoderEngine):
    """Implements `engines.protocol.Engine`, `ProvesReloads` and `Profiles`; has no baselines of transformers."""

    def __init__(
        self,
        name: str = "vllm-0",
        *,
        python: str = "",
        arguments: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        """`python`: of the venv with vLLM; found by default. `arguments`: of `vllm.LLM`, as `{"enforce_eager": False}`. `options`: as
        the decoder engine's. Raises InputError where vLLM is not installed.
        """
        super().__init__(name, **options)  # type: ignore[arg-type]
        self._python = python or find_python()
        self._arguments = dict(arguments or {})

    def baselines(self) -> Sequence[str]:
        """None: transformers' own loop is the decoder engine's denominator."""
        return ()

    def measure_baseline(
        self, name: str, rows: Sequence[ShapeRow], seed: int, deadline_seconds: float
    ) -> BaselineMeasurement:
        raise InputError("baseline", name, "is not measured by the vllm engine", "ask a decoder engine")

    def _cuts(self, deployment: Deployment, tier: Tier) -> tuple[tuple[int, ...], ...]:
        if (self._device or deployment.hardware.device) != "cpu":
            raise InputError("device", deployment.hardware.device, "is not one of the vllm engine", "use cpu")
        refuse_unserved(deployment.model)
        return (tuple(range(deployment.model.num_layers)),)

    def _recipe(self, deployment: Deployment, cuts: tuple[tuple[int, ...], ...]) -> Recipe:
        self._chunk_tokens = deployment.shapes.chunk_tokens
        return super()._recipe(deployment, cuts)

    def _new_stable(self, recipe: Recipe) -> Stable:
        return VllmStable(recipe, self._python, {**llm_arguments(recipe, self._chunk_tokens), **self._arguments})

    def _default_builder(self, deployment: Deployment, cuts: Sequence[tuple[int, ...]]) -> Builder:
        return VllmBuilder(deployment.model, cache_dir=self._cache_dir, threads=self._threads)

    def _environment_record(self, threads: int) -> Environment:
        record = super()._environment_record(threads)
        return dataclasses.replace(record, versions={**record.versions, **versions(self._python)})


def slot_table(model: ModelRef, threads: int) -> SlotTable:
    """Slots of a model in vLLM's tree, from a vLLM that is started for it. Raises InputError, MachineError."""
    with _started(model, threads) as child:
        return _asked_slots(child)


def part_template(model: ModelRef, threads: int, named: str) -> str:
    """Text of a part to start from, for the first slot that a name or claim pattern means. Raises InputError for one that means none."""
    with _started(model, threads) as child:
        table = _asked_slots(child)
        found = table.matching(named)
        if not found:
            raise InputError("slot", named, "is not in the slot table", nearest(named, list(table.names()))[:300])
        return str(
            child.call_plain("part_template", {"slot": found[0].name}, deadline=time.monotonic() + BIRTH_SECONDS)
        )


def _asked_slots(child: Child) -> SlotTable:
    return child.call_record("slots", None, SlotTable, deadline=time.monotonic() + BIRTH_SECONDS)


@contextmanager
def _started(model: ModelRef, threads: int) -> Iterator[Child]:
    """A child with a vLLM for whoever looks at its tree. Raises InputError, MachineError."""
    refuse_unserved(model)
    recipe = Recipe(
        program=DECODER,
        preload=(),
        preload_optional=(),
        search_path=(),
        model=model,
        device="cpu",
        threads=threads,
        cuts=(tuple(range(model.num_layers)),),
        rows=(_ONE_STEP,),
        serving_slots=1,
        serving_context=64,
        widths=(),
        limits=default_limits("cpu"),
        sources=lambda seed, held_out: RandomTokens(model.vocab_size, seed),
        seed=0,
        pool_sets=1,
        window_seconds=0.0,
        aa_seconds=0.0,
    )
    stable = VllmStable(recipe, find_python(), llm_arguments(recipe, 64))
    try:
        with machine_fault("vLLM"), stable.started() as child:
            yield child
    finally:
        stable.close()


class VllmBuilder:
    """Builds for a vLLM engine: slots by the names of vLLM's tree, derived weights from what it merges."""

    def __init__(self, model: ModelRef, *, cache_dir: str = "", threads: int = 1) -> None:
        self._model, self._cache_dir, self._threads = model, cache_dir or None, threads
        self._names = vllm_module_names(open_weights(model))

    def __call__(self, candidate: Candidate, seconds: float) -> Sequence[PartFiles]:
        """Files, one entry a part. Raises CandidateFailed."""
        return self.build(candidate, seconds).parts

    def build(self, candidate: Candidate, deadline_seconds: float) -> BuiltCandidate:
        """The same with what it took."""
        return build_candidate(
            candidate,
            self._model,
            self._names,
            [tuple(range(self._model.num_layers))],
            cache_dir=self._cache_dir,
            threads=self._threads,
            deadline_seconds=deadline_seconds,
        )
