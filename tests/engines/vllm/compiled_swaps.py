"""Run by vLLM's own interpreter: one compiled vLLM of a tiny model, a canary swapped in with and without a recapture. Prints JSON.

usage: python -m tests.engines.vllm.compiled_swaps MODEL.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from engines.prepare.store import open_weights
from engines.program import Artefacts, CandidateFailed, KvPlan, WindowInputs
from engines.vllm.program import VllmProgram
from hotpass.decode import from_plain
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import ModelRef
from hotpass.records.shapes import Phase, ShapeRow
from tests.engines.vllm.vllm_parts import part

MLP = "model.layers.*.mlp"
ROW = ShapeRow(
    phase=Phase.DECODE, num_seqs=2, query_tokens=2, context_mean=12, context_max=16, steps_share=1.0, tokens_share=1.0
)
PLAN = KvPlan(rows=(ROW,), steps_per_window=(3,), serving_slots=1, serving_context=64)
WRONG = "return -self.reference(x)"
RECAPTURE = "reload='recapture'"


class Swapping(VllmProgram):
    """With `captures` off, forwards are swapped as under eager, and what is compiled stays what it is."""

    captures = True

    def _recapture(self, side: str) -> None:
        if self.captures:
            super()._recapture(side)
        else:
            self._activate(side)


def main() -> None:
    model = from_plain(ModelRef, json.loads(Path(sys.argv[1]).read_text()))
    program = Swapping()
    program.load(model, open_weights(model), [tuple(range(model.num_layers))], "cpu", 1, PLAN)
    born = program.fingerprint()
    loaded, _ = window(program, model)
    canary = part("canary", MLP, "x", WRONG, more=RECAPTURE)
    program.captures = False
    program.install("candidate", canary, Artefacts(), 0)
    swapped, swapped_counts = window(program, model)
    program.captures = True
    program.install("candidate", canary, Artefacts(), 0)
    captured, captured_counts = window(program, model)
    beside, _ = window(program, model, "incumbent")
    refused = {
        "hot": refusal(program, part("hot", MLP, "x", WRONG)),
        "shrinks": refusal(program, part("shrinks", "model.layers.1.mlp", "x", "return x[:1].clone()", more=RECAPTURE)),
    }
    program.uninstall("candidate")
    again, _ = window(program, model)
    now = program.fingerprint()
    print(
        json.dumps(
            {
                "swapped": {"moved": moved(swapped, loaded), "counts": swapped_counts},
                "captured": {"moved": moved(captured, loaded), "counts": captured_counts},
                "beside": moved(beside, loaded),
                "again": moved(again, loaded),
                "refused": refused,
                "clean": [now.probes == born.probes, now.flags["trees"], now.flags["patched"]],
            }
        )
    )


def window(program: VllmProgram, model: ModelRef, side: str = "candidate") -> tuple[torch.Tensor, dict[str, int]]:
    """Logits of a window on contexts that are equal each time, and calls of parts."""
    shape = (model.num_layers, 2, model.num_kv_heads, 16, model.head_dim)
    generator = torch.Generator().manual_seed(1)
    contexts = [torch.randn(shape, generator=generator)[:, :, :, :length] for length in PLAN.row_contexts(0)]
    program.load_contexts(side, 0, 0, contexts)
    tokens = torch.arange(6).view(3, 2)
    out = torch.full((3, 2, model.vocab_size), float("nan"))
    reply = program.run_window(side, 0, 0, WindowInputs(tokens=tokens, nonce="n"), out)
    assert reply.failure is None, reply.failure
    return out, dict(reply.activation)


def refusal(program: VllmProgram, candidate: Candidate) -> str:
    """Why an install fails; empty when it does not."""
    try:
        program.install("candidate", candidate, Artefacts(), 0)
    except CandidateFailed as error:
        return error.failure.message
    return ""


def moved(some: Any, others: Any) -> float:
    return float((some - others).abs().max())


if __name__ == "__main__":
    main()
