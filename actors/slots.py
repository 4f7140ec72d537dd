"""Slots of a model without an engine: the table, the reference's source, and a part to start from. In-process, on the CPU.

Loads the module tree over the mapped weights (a second or two for a small model); runs nothing of a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotpass.records.deployment import ModelRef
from hotpass.records.shapes import Phase, ShapeRow

if TYPE_CHECKING:
    from engines.decoder.program import DecoderProgram

_ONE_STEP = ShapeRow(
    phase=Phase.DECODE, num_seqs=1, query_tokens=1, context_mean=16, context_max=16, steps_share=1.0, tokens_share=1.0
)


def open_program(model: ModelRef) -> DecoderProgram:
    """The whole model as the decoder engine's children have it. Raises InputError for a model that cannot be read."""
    from engines.decoder.program import DecoderProgram
    from engines.prepare.store import open_weights
    from engines.program import KvPlan

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


def concrete_slot(program: DecoderProgram, named: str) -> str:
    """The first slot that a name or claim pattern means; the name itself when it means none (the program then says so)."""
    found = program.slots().matching(named)
    return found[0].name if found else named


def reference_sources(model: ModelRef, claims: Sequence[str]) -> dict[str, str]:
    """Claim → source of the class that its slots stand for."""
    program = open_program(model)
    known = {claim: program.slots().matching(claim) for claim in claims}
    return {claim: program.reference_source(slots[0].name) for claim, slots in known.items() if slots}
