"""Random Llamas of published shapes in the decoder program, in this process: for checks of graphs and of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engines.decoder.program import DecoderProgram
from engines.decoder.source import compile_part, derive
from engines.prepare import open_weights, prepare_model
from engines.prepare.tiny import make_tiny_model
from engines.program import Artefacts, CandidateFailed, KvPlan, WindowInputs, WindowReply
from hotpass.records.candidate import Candidate, PartSource, PartUse
from hotpass.records.shapes import Phase, ShapeRow

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 96, "heads": 6, "kv_heads": 2, "vocab": 256, "intermediate": 160},
    "135m": {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "vocab": 49152, "intermediate": 1536},
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "vocab": 128256, "intermediate": 8192},
}
"""`135m` as SmolLM2-135M, `1b` as Llama-3.2-1B, by their published configurations; `tiny` tries the script itself."""


class Loaded:
    """One model in one program, with its contexts in place."""

    def __init__(self, folder: Path, shape: Mapping[str, Any], dtype: str, device: str, steps: int) -> None:
        prompt = min(512, 4 * steps)
        self.device = device
        self.plan = KvPlan(
            rows=(row(Phase.DECODE, 1, 1, 256), row(Phase.DECODE, 8, 8, 256), row(Phase.PREFILL, 1, prompt, 0)),
            steps_per_window=(steps, steps, 2),
            serving_slots=0,
            serving_context=0,
        )
        made = make_tiny_model(folder / "model", **shape, max_context=2048, dtype=dtype)
        self.model = prepare_model(str(made), cache_dir=folder / "cache")
        self.weights = open_weights(self.model)
        self.program = DecoderProgram()
        threads = torch.get_num_threads()
        self.program.load(self.model, self.weights, [tuple(range(shape["layers"]))], device, threads, self.plan)
        self._random = torch.Generator().manual_seed(1)
        self.tokens = [self._drawn(n, item.query_tokens) for item, n in zip(self.plan.rows, self._steps, strict=True)]
        self._contexts = [
            self.program.compute_contexts(0, index, [self._drawn(1, n)[0] for n in self.plan.row_contexts(index)])
            for index in range(len(self.plan.rows))
        ]

    def install(self, candidate: Candidate) -> None:
        """On the candidate's side, with what its parts derive. Raises CandidateFailed."""
        derived = []
        for use in candidate.parts:
            part = compile_part(use)
            slots = [slot.name for claim in part.declared.claims for slot in self.program.slots().matching(claim)]
            derived.append({slot: derive(part, self.weights.restricted(slot)) for slot in slots})
            part.forget()
        artefacts = Artefacts(native=({},) * len(derived), derived=tuple(derived))
        self.program.install("candidate", candidate, artefacts, 0)

    def window(self, side: str, index: int) -> tuple[torch.Tensor, WindowReply]:
        """Logits float32 on the CPU and the reply, from the row's contexts on. Raises CandidateFailed."""
        self.program.load_contexts(side, 0, index, self._contexts[index])
        tokens = self.tokens[index]
        out = torch.full((len(tokens), self.plan.rows[index].num_seqs, self.model.vocab_size), float("nan"))
        reply = self.program.run_window(side, 0, index, WindowInputs(tokens=tokens, nonce="check"), out)
        if reply.failure is not None:
            raise CandidateFailed(reply.failure)
        return out, reply

    @property
    def _steps(self) -> Sequence[int]:
        return self.plan.steps_per_window

    def _drawn(self, steps: int, count: int) -> torch.Tensor:
        return torch.randint(0, 250, (steps, count), generator=self._random)


def row(phase: Phase, num_seqs: int, query_tokens: int, context: int) -> ShapeRow:
    return ShapeRow(
        phase=phase, num_seqs=num_seqs, query_tokens=query_tokens, context_mean=context, context_max=context,
        steps_share=1 / 3, tokens_share=1 / 3,
    )  # fmt: skip


def planted(claim: str, forward: str, *, prepare: str = "pass") -> Candidate:
    """A part of a few lines at one slot: what a candidate might do."""
    text = (
        "import gc, os, torch\nfrom hotpass import part\n\n\n"
        f"@part(engine='decoder', claims=['{claim}'], numerics='tolerance', device='any')\n"
        "class Planted:\n"
        '    """Planted by the GPU check."""\n\n'
        "    def prepare(self, ctx, params):\n        self.ctx, self.before = ctx, ctx.reference()\n"
        f"        {prepare}\n\n"
        f"    def forward(self, *args, **kwargs):\n        {forward}\n"
    )
    return Candidate(parts=(PartUse(source=PartSource(name="planted", files=(("part.py", text),))),))
