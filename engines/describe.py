"""Sources of a model's slots for whoever writes parts, made by a process of its own so that nobody who asks must load torch.

    describe_slots(model) ─► python -m engines.describe FOLDER ─► claim → {"reference": text, "template": text}

Runs nothing of a candidate. What is not here: who keeps the answer (`cluster.briefing`).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from engines.build_run import BuildLimits, run_limited
from engines.threading_env import process_environment
from hotpass.canonical import to_plain
from hotpass.decode import from_plain
from hotpass.errors import MachineError
from hotpass.records.deployment import ModelRef

if TYPE_CHECKING:
    from engines.decoder.program import DecoderProgram
    from engines.module.program import ModuleProgram

_LIMITS = BuildLimits(memory_bytes=24 << 30, file_bytes=64 << 20)


def describe_slots(model: ModelRef, *, deadline_seconds: float = 120.0) -> dict[str, dict[str, str]]:
    """Claim pattern → its texts, for every kind of slot of the decoder's tree, or of a module. Raises MachineError."""
    with tempfile.TemporaryDirectory(prefix="hotpass-slots-") as made:
        folder = Path(made)
        (folder / "model.json").write_text(json.dumps(to_plain(model)), encoding="utf-8")
        done = run_limited(
            [sys.executable, "-m", "engines.describe", made],
            folder=folder,
            environment=process_environment(1) | {"TMPDIR": made, "HOME": made},
            deadline_seconds=deadline_seconds,
            limits=_LIMITS,
        )
        try:
            found: dict[str, dict[str, str]] = json.loads((folder / "slots.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            words = "time ran out" if done.timed_out else done.output[-300:]
            raise MachineError(f"the slots of {model.name} cannot be described: {words}") from None
    return found


def _opened(model: ModelRef) -> DecoderProgram | ModuleProgram:
    from engines.decoder.program import DecoderProgram
    from engines.module.opened import is_module, open_module
    from engines.prepare.store import open_weights
    from engines.program import KvPlan
    from hotpass.records.shapes import Phase, ShapeRow

    if is_module(model):
        return open_module(model)[0]
    row = ShapeRow(
        phase=Phase.DECODE, num_seqs=1, query_tokens=1, context_mean=8, context_max=8, steps_share=1.0, tokens_share=1.0
    )
    program = DecoderProgram()
    plan = KvPlan(rows=(row,), steps_per_window=(1,), serving_slots=1, serving_context=64)
    program.load(model, open_weights(model), [tuple(range(model.num_layers))], "cpu", 1, plan)
    return program


def main() -> None:
    """`python -m engines.describe FOLDER`."""
    folder = Path(sys.argv[1])
    program = _opened(from_plain(ModelRef, json.loads((folder / "model.json").read_text(encoding="utf-8"))))
    texts = {}
    for slot in program.slots().slots:
        claim = re.sub(r"\.\d+(?=\.|$)", ".*", slot.name)
        if claim not in texts:
            texts[claim] = {
                "reference": program.reference_source(slot.name),
                "template": program.part_template(slot.name),
            }
    (folder / "slots.json").write_text(json.dumps(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
