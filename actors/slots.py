"""Slots of a model without an engine: the table, the reference's source, and a part to start from. In-process, on the CPU.

Loads the module tree over the mapped weights (a second or two for a small model); runs nothing of a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hotpass.records.deployment import ModelRef
from hotpass.records.shapes import Phase, ShapeRow
from hotpass.records.slots import SlotTable

if TYPE_CHECKING:
    from engines.decoder.program import DecoderProgram
    from engines.module.program import ModuleProgram

_ONE_STEP = ShapeRow(
    phase=Phase.DECODE, num_seqs=1, query_tokens=1, context_mean=16, context_max=16, steps_share=1.0, tokens_share=1.0
)


def open_program(model: ModelRef) -> DecoderProgram | ModuleProgram:
    """The whole model as an engine's children have it. Raises InputError for a model that cannot be read."""
    from engines.decoder.program import DecoderProgram
    from engines.module.opened import is_module, open_module
    from engines.prepare.store import open_weights
    from engines.program import KvPlan

    if is_module(model):
        return open_module(model)[0]
    program = DecoderProgram()
    program.load(
        model,
        open_weights(model),
        [tuple(range(model.num_layers))],
        "cpu",
        1,
        KvPlan(rows=(_ONE_STEP,), steps_per_window=(1,), serving_slots=1, serving_context=64),
    )
    return program


def vllm_slots(model: ModelRef) -> SlotTable:
    """Slots of vLLM's own tree: starts a vLLM, asks it, ends it (half a minute). Raises InputError where it is not installed."""
    from engines.threading_env import usable_cores
    from engines.vllm_engine import slot_table

    return slot_table(model, usable_cores())


def vllm_part_template(model: ModelRef, named: str) -> str:
    """A part to start from in vLLM's own tree, by a vLLM that is started for it. Raises InputError for a name that is no slot."""
    from engines.threading_env import usable_cores
    from engines.vllm_engine import part_template

    return part_template(model, usable_cores(), named)


def concrete_slot(program: DecoderProgram | ModuleProgram, named: str) -> str:
    """The first slot that a name or claim pattern means; the name itself when it means none (the program then says so)."""
    found = program.slots().matching(named)
    return found[0].name if found else named


def reference_sources(model: ModelRef, claims: Mapping[str, str]) -> dict[str, str]:
    """Claim → source of the class that its slots stand for. `claims`: claim → class that its part replaces, or empty."""
    program = open_program(model)
    known = {claim: program.slots().matching(claim, replaces) for claim, replaces in claims.items()}
    return {claim: program.reference_source(slots[0].name) for claim, slots in known.items() if slots}
