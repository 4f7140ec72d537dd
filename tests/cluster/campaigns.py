"""Builders for tests of campaigns: a small plan, parts with known speeds, machines around a fake engine. No test is in here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from actors.builder import BuilderServer
from actors.engine import EngineServer
from cluster.campaign import Running
from cluster.machines import Machines, MachinesOpener, engine_spec
from cluster.plan import Plan, pace_for
from cluster.ports import LocalBuilder, LocalEngine, View
from cluster.resolve import simulated_hardware, simulated_model
from cluster.spec import CampaignSpec
from engines.fake import FakeEngine, step_time_from_costs
from hotpass.records.candidate import PartSource
from hotpass.records.deployment import Deployment, Serving, TrafficRef
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable

SHAPES = ShapeTable(
    rows=(
        ShapeRow(
            phase=Phase.DECODE,
            num_seqs=1,
            query_tokens=1,
            context_mean=256,
            context_max=512,
            steps_share=0.9,
            tokens_share=0.95,
        ),
        ShapeRow(
            phase=Phase.PREFILL,
            num_seqs=1,
            query_tokens=128,
            context_mean=0,
            context_max=0,
            steps_share=0.1,
            tokens_share=0.05,
        ),
    ),
    concurrency=1,
    chunk_tokens=512,
    num_steps=1000,
    output_tokens_per_step=0.95,
)

FACTORS = {"quick-mlp": 0.7, "quick-attention": 0.8, "slow-norm": 1.2}
"""Part → factor on the step time: the two quick ones together give 1 / 0.56 = 1.79."""

CLAIMS = {"quick-mlp": "mlp", "quick-attention": "self_attn", "slow-norm": "input_layernorm", "crash-mlp": "mlp"}


def part(name: str, child: str) -> PartSource:
    """A part on a child of every layer."""
    text = (
        "from hotpass import part\n\n\n"
        f"@part(engine='decoder', claims=['model.layers.*.{child}'], numerics='tolerance')\n"
        f"class Part:\n    '''{name}: does less in {child}.'''\n\n"
        "    def forward(self, *args):\n        return args[0]\n"
    )
    return PartSource(name=name, files=(("part.py", text),))


PARTS = tuple(part(name, child) for name, child in CLAIMS.items())


def make_plan(folder: Path, **changes: object) -> Plan:
    """A plan for the fake engine, resolved by hand."""
    fields: dict[str, object] = {
        "model": "tiny",
        "traffic": "by-hand",
        "engine": "fake",
        "ray": False,
        "out": str(folder),
    }
    spec = CampaignSpec(**{**fields, **changes})  # type: ignore[arg-type]
    deployment = Deployment(
        model=simulated_model("tiny"),
        traffic=TrafficRef(
            name="by-hand",
            source_format="preset",
            content_hash="0" * 64,
            num_requests=10,
            dropped={},
            content_valid=False,
        ),
        hardware=simulated_hardware(),
        serving=Serving(engine="simulated"),
        concurrency=1,
        shapes=SHAPES,
    )
    return Plan(
        campaign=folder.name,
        created="2026-11-30T20:00:00+00:00",
        spec=spec,
        deployment=deployment,
        pace=pace_for(spec.budget_seconds),
        versions={"hotpass": "0.1.0"},
    )


def machines_with(
    make_engine: Callable[[], FakeEngine], wrap: Callable[[LocalEngine], LocalEngine] = lambda port: port
) -> MachinesOpener:
    """One engine in this process, made by the test."""

    @contextlib.contextmanager
    def opened(plan: Plan, view: View) -> Iterator[Machines]:
        server = EngineServer(engine_spec(plan), lambda spec, deployment: make_engine())
        builder = LocalBuilder(BuilderServer(server.spec, plan.deployment, 10.0))
        yield Machines(engines=[wrap(LocalEngine(server))], builder=builder, build_ahead=False, compiler=True)

    return opened


def fake(factors: Mapping[str, float] = FACTORS, **options: object) -> FakeEngine:
    """Known speeds, one per cent noise."""
    given = {"logit_error": lambda candidate: 1e-5 if candidate.parts else 0.0, **options}
    return FakeEngine("fake-0", step_time=step_time_from_costs(20.0, factors), **given)  # type: ignore[arg-type]


@contextlib.contextmanager
def unmirrored(plan: Plan, folder: Path, view: View) -> Iterator[None]:
    """No MLflow: its mirror has tests of its own."""
    yield None


def make_running(
    folder: Path, *, parts: tuple[PartSource, ...] = PARTS, engine: Callable[[], FakeEngine] = fake, **changes: object
) -> Running:
    """A campaign that is ready to run."""
    return Running(
        plan=make_plan(folder, **changes),
        open_machines=machines_with(engine),
        catalogue=lambda device: parts,
        mirrored=unmirrored,
    )
