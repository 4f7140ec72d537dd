"""How an engine is asked for: plain data that crosses to the node where the engine will live, and the one place that makes it.

Engines are made where they run, never shipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actors.requests import replay_maker
from engines.protocol import Engine
from hotpass.canonical import content_hash
from hotpass.errors import InputError
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.shapes import ShapeRow
from hotpass.traffic import Traffic

if TYPE_CHECKING:
    from engines.build import CandidateBuilder
    from engines.build_compile import CompileSetup
    from engines.vllm_engine import VllmBuilder

NARROWEST_BITS = 4.5
"""Of a weight in any candidate that the catalogue can make (4-bit blocks with a scale and a minimum): how deep cuts must be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Everything that making an engine takes, beside the deployment that it loads."""

    kind: str
    """`decoder`, `module`, `vllm` or `fake`."""
    name: str
    """Of this engine within the campaign, as `decoder-0`."""
    campaign: str = ""
    """Folder of the campaign that it works for: what others read who wait for its measuring lease."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    threads: int = 0
    """Threads of the deployment as loaded; 0 for the physical cores."""
    cache_dir: str = ""
    """Where built libraries and derived weights are kept; empty for the user's cache."""
    seed: int = 0
    traffic: Traffic | None = None
    """Requests that the slow tier may replay (`actors.requests.sample`); None for engines that need none."""
    narrowest_bits: float = NARROWEST_BITS
    """Of a weight in any candidate: the fewer, the deeper are the cuts of the fast tier."""
    pool_sets: int = 4
    """Input sets a row whose right answers are computed at the load; half as many of rows with prompts."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES set before the engine starts; None leaves what the process has."""


EngineMaker = Callable[[EngineSpec, Deployment], Engine]


def make_engine(spec: EngineSpec, deployment: Deployment) -> Engine:
    """The engine of a spec, not loaded yet. Raises InputError for an unknown kind."""
    if spec.visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.visible_devices
    if spec.kind == "fake":
        return _fake(spec)
    if spec.kind in ("decoder", "vllm"):
        return _of_a_language_model(spec, deployment)
    if spec.kind == "module":
        return _module(spec, deployment)
    raise InputError("engine", spec.kind, "is not known", "known: decoder, module, vllm, fake")


def make_builder(spec: EngineSpec, deployment: Deployment) -> CandidateBuilder | VllmBuilder:
    """What builds for an engine with processes: the same inside the engine and ahead of it, so that both find the same files."""
    from engines.build import CandidateBuilder

    if spec.kind == "vllm":
        from engines.vllm_engine import VllmBuilder

        return VllmBuilder(
            deployment.model, cache_dir=spec.cache_dir, threads=spec.threads or deployment.hardware.num_devices
        )
    return CandidateBuilder(
        deployment.model,
        cuts_of(spec, deployment),
        cache_dir=spec.cache_dir or None,
        threads=spec.threads or deployment.hardware.num_devices,
        setup=_compile_setup(spec, deployment),
    )


def _compile_setup(spec: EngineSpec, deployment: Deployment) -> CompileSetup:
    """What an engine of this spec compiles for."""
    from engines.build_compile import CompileSetup
    from engines.decoder_engine import DECODER, served_context
    from engines.program import KvPlan
    from engines.threading_env import usable_cores

    rows = deployment.shapes.rows
    program, serving, context = DECODER, deployment.concurrency, served_context(deployment.model)
    search_path: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    if spec.kind == "module":
        from engines.module.prepare import module_facts
        from engines.module_engine import PROGRAM, SERVED_WORDS

        facts = module_facts(deployment.model)
        program, search_path = PROGRAM, facts.recipe.search_path
        widths, serving, context = tuple(example.width for example in facts.examples), 0, SERVED_WORDS
    plan = KvPlan(
        rows=rows,
        steps_per_window=(1,) * len(rows),
        serving_slots=serving,
        serving_context=context,
        widths=widths,
    )
    return CompileSetup(
        program=program,
        model=deployment.model,
        plan=plan,
        device=spec.device,
        threads=spec.threads or usable_cores(),
        search_path=search_path,
    )


def cuts_of(spec: EngineSpec, deployment: Deployment) -> tuple[tuple[int, ...], ...]:
    """Layers of each depth that an engine of this spec measures, the whole model last."""
    from engines.cuts import choose_cuts

    if spec.kind in ("module", "vllm"):
        return (tuple(range(deployment.model.num_layers)),)
    return choose_cuts(deployment.model, deployment.hardware.last_level_cache_bytes, spec.narrowest_bits)


def wider_bits(spec: EngineSpec, deployment: Deployment) -> float | None:
    """`narrowest_bits` of the next deeper cuts; None when the fast tier is the whole model already."""
    now = cuts_of(spec, deployment)
    bits = spec.narrowest_bits
    while len(now) > 1:
        bits /= 1.25
        if cuts_of(replace(spec, narrowest_bits=bits), deployment) != now:
            return bits
    return None


def _fake(spec: EngineSpec) -> Engine:
    from engines.fake import FakeEngine

    return FakeEngine(
        spec.name, step_time=simulated_step_ms, seed=spec.seed, logit_error=lambda c: 1e-5 if c.parts else 0.0
    )


def _of_a_language_model(spec: EngineSpec, deployment: Deployment) -> Engine:
    """Transformers' modules, or a live vLLM."""
    from engines.decoder_engine import DecoderEngine
    from engines.prepare.store import load_tokenizer
    from engines.vllm_engine import VllmEngine

    requests = None
    if spec.traffic is not None:
        requests = replay_maker(spec.traffic, load_tokenizer(deployment.model).encode)
    made: type[DecoderEngine] = VllmEngine if spec.kind == "vllm" else DecoderEngine
    return made(
        spec.name,
        device=spec.device,
        threads=spec.threads or None,
        seed=spec.seed,
        builder=make_builder(spec, deployment),
        requests=requests,
        narrowest_bits=spec.narrowest_bits,
        pool_sets=spec.pool_sets,
    )


def _module(spec: EngineSpec, deployment: Deployment) -> Engine:
    from engines.module_engine import ModuleEngine

    return ModuleEngine(
        spec.name,
        device=spec.device,
        threads=spec.threads or None,
        seed=spec.seed,
        builder=make_builder(spec, deployment),
        pool_sets=spec.pool_sets,
    )


def simulated_step_ms(candidate: Candidate, row: ShapeRow) -> float:
    """Step time of the fake engine: 20 ms scaled by the row, and by a factor in [0.6, 1.15) that each part's or setting's
    name and values hash to. Nothing is known about real parts here; it only makes a search that has something to find."""
    time = 20.0 * (1 + 0.02 * row.query_tokens + 1e-4 * row.context_mean)
    names = [f"{use.source.name}{sorted(use.params.items())}" for use in candidate.parts]
    names += [f"{name}={value}" for name, value in candidate.settings.items()]
    for name in names:
        time *= 0.6 + 0.55 * int(content_hash(name)[:8], 16) / 2**32
    return time
