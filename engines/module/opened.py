"""A prepared module as an engine's children have it, in this process and on the CPU: for whoever writes parts, never for timing."""

from __future__ import annotations

from pathlib import Path

from engines.module.prepare import module_facts
from engines.module.program import ModuleProgram
from engines.module_engine import SERVED_WORDS, module_shapes
from engines.prepare.store import MODULE_FILE, WeightStore, open_weights
from engines.program import KvPlan
from hotpass.records.deployment import ModelRef


def is_module(model: ModelRef) -> bool:
    """Whether a prepared folder holds a module rather than a language model."""
    return (Path(model.folder) / MODULE_FILE).exists()


def open_module(model: ModelRef, *, steps: int = 1) -> tuple[ModuleProgram, WeightStore, KvPlan]:
    """Its program with one thread, its weights, and a plan whose rows are its examples, `steps` calls a window.

    Raises InputError for a recipe that does not run.
    """
    facts = module_facts(model)
    plan = KvPlan(
        rows=module_shapes(facts.examples).rows,
        steps_per_window=(steps,) * len(facts.examples),
        serving_slots=0,
        serving_context=SERVED_WORDS,
        widths=tuple(example.width for example in facts.examples),
    )
    program, store = ModuleProgram(), open_weights(model)
    program.load(model, store, [tuple(range(model.num_layers))], "cpu", 1, plan)
    return program, store, plan
