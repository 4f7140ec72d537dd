"""Where engines and builders live: in this process, or as actors on a local or given Ray. One place decides, the loop never knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from actors.builder import BUILDS_AT_ONCE, BuilderServer
from actors.engine import EngineServer
from actors.requests import sample
from actors.spec import EngineSpec
from cluster.plan import Plan, may_build_ahead
from cluster.ports import BuilderPort, EnginePort, LocalBuilder, LocalEngine, View
from hotpass.errors import InputError
from hotpass.traffic import Traffic, read_traffic

BUILD_DEADLINE_SECONDS = 120.0
REPLAY_CHOICE = 256
"""Requests that travel to an engine for its replays; they are drawn from these by seed."""
REPLAY_CONTEXT = 2048
"""Tokens of a request that can be replayed: the engine's serving slots are that long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Engines and a builder, started."""

    engines: Sequence[EnginePort]
    builder: BuilderPort
    build_ahead: bool
    """Whether builders may run while an engine measures: on a GPU, or with cores to spare."""
    compiler: bool
    """Whether there is a C++ compiler where the engines are."""
    builds_at_once: int = 1
    """Builds that the builder carries out at a time."""


MachinesOpener = Callable[[Plan, View], AbstractContextManager[Machines]]


@contextlib.contextmanager
def open_machines(plan: Plan, view: View) -> Iterator[Machines]:
    """Started on entry, closed on exit. Raises MachineError or InputError with the demand and the capacity by name."""
    if plan.spec.ray:
        with _on_ray(plan, view) as machines:
            yield machines
        return
    builder = LocalBuilder(BuilderServer(engine_spec(plan), plan.deployment, BUILD_DEADLINE_SECONDS))
    engines = [LocalEngine(EngineServer(engine_spec(plan, index))) for index in range(num_engines(plan))]
    yield Machines(engines=engines, builder=builder, build_ahead=False, compiler=builder.server.has_compiler())


@contextlib.contextmanager
def _on_ray(plan: Plan, view: View) -> Iterator[Machines]:
    """Engines and a builder as actors."""
    from actors.local import connected
    from actors.remote import RemoteBuilder, RemoteEngine

    spec = engine_spec(plan)
    view.activity("ray", f"connecting to {plan.spec.address}" if plan.spec.address else "starting a local Ray")
    with connected(plan.spec.address, namespace=f"hotpass-{plan.campaign}"), contextlib.ExitStack() as stack:
        view.activity("ray", "")
        builder = RemoteBuilder(spec, plan.deployment, BUILD_DEADLINE_SECONDS)
        stack.callback(builder.close)
        engines = [RemoteEngine(engine_spec(plan, index), num_cpus=1.0) for index in range(num_engines(plan))]
        yield Machines(
            engines=engines,
            builder=builder,
            build_ahead=may_build_ahead(plan),
            compiler=builder.has_compiler,
            builds_at_once=BUILDS_AT_ONCE,
        )


def num_engines(plan: Plan) -> int:
    """As asked for; else one a memory-bandwidth domain, which is all that can measure at once: each GPU, or the CPU."""
    hardware = plan.deployment.hardware
    return plan.spec.engines or (hardware.num_devices if hardware.device == "cuda" else 1)


def engine_spec(plan: Plan, index: int = 0) -> EngineSpec:
    """Of the engine with that index."""
    hardware = plan.deployment.hardware
    return EngineSpec(
        kind=plan.spec.engine,
        name=f"{plan.spec.engine}-{index}",
        campaign=plan.spec.out,
        device=hardware.device,
        threads=plan.spec.threads,
        seed=plan.spec.seed + index,
        pool_sets=plan.pace.pool_sets,
        traffic=replayed_traffic(plan) if plan.spec.engine in ("decoder", "vllm") else None,
    )


def replayed_traffic(plan: Plan) -> Traffic:
    """What the slow tier draws from. Raises InputError when the trace is no longer what the campaign was planned with."""
    from engines.prepare.store import load_tokenizer

    spec, deployment = plan.spec, plan.deployment
    traffic = read_traffic(
        spec.traffic,
        max_context=deployment.model.max_context,
        limit=spec.requests or None,
        encode=load_tokenizer(deployment.model).encode,
    )
    if traffic.ref.content_hash != deployment.traffic.content_hash:
        raise InputError("traffic", spec.traffic, "has changed since this campaign was planned", "start a new campaign")
    return sample(traffic, REPLAY_CHOICE, plan.pace.replay_output_tokens, REPLAY_CONTEXT)
