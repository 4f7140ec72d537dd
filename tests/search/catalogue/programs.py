"""A tiny model loaded into a decoder program in this process, and a part of the catalogue run on it beside the reference."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.decoder.program import DecoderProgram
from engines.decoder.source import compile_part, derive
from engines.prepare import open_weights, prepare_model
from engines.prepare.store import WeightStore
from engines.prepare.tiny import make_tiny_model
from engines.program import Artefacts, KvPlan, WindowInputs
from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate, PartSource, Value
from hotpass.records.shapes import Phase, ShapeRow

VOCAB = 256
SIZES = {"layers": 3, "hidden": 96, "heads": 6, "kv_heads": 2, "intermediate": 160}


def shape(phase: Phase, num_seqs: int, query_tokens: int, mean: int, longest: int | None = None) -> ShapeRow:
    return ShapeRow(
        phase=phase,
        num_seqs=num_seqs,
        query_tokens=query_tokens,
        context_mean=mean,
        context_max=mean if longest is None else longest,
        steps_share=0.125,
        tokens_share=0.125,
    )


ROWS = (
    shape(Phase.DECODE, 1, 1, 12),
    shape(Phase.DECODE, 3, 3, 14, 20),
    shape(Phase.DECODE, 2, 2, 70),
    shape(Phase.DECODE, 1, 1, 133),
    shape(Phase.PREFILL, 2, 9, 0),
    shape(Phase.PREFILL, 2, 9, 6, 7),
    shape(Phase.MIXED, 3, 8, 7),
    shape(Phase.PREFILL, 1, 70, 0),
)
"""Decode alone, ragged and as one group; long contexts that do not divide; prompts with and without a context; a mixture."""

PLAN = KvPlan(rows=ROWS, steps_per_window=(2,) * len(ROWS), serving_slots=2, serving_context=40)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    logits: torch.Tensor
    """[steps, num_seqs, vocab] float32."""
    activation: Mapping[str, int]


class Bench:
    """One loaded program. Sides run on equal contexts, those of the reference, and on equal tokens."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        sizes: Mapping[str, int] = SIZES,
        plan: KvPlan = PLAN,
        rope: Mapping[str, object] | None = None,
    ) -> None:
        self.plan, self.rows = plan, range(len(plan.rows))
        made = make_tiny_model(folder / "tiny", **sizes, dtype=dtype, max_context=256)
        if rope is not None:
            config = json.loads((made / "config.json").read_text())
            (made / "config.json").write_text(json.dumps(config | {"rope_parameters": dict(rope)}))
        self.model = prepare_model(str(made), cache_dir=folder / "cache")
        self.weights: WeightStore = open_weights(self.model)
        self.program = DecoderProgram()
        self.program.load(self.model, self.weights, [tuple(range(sizes["layers"]))], "cpu", 1, plan)
        generator = torch.Generator().manual_seed(5)
        self._tokens = [
            torch.randint(0, VOCAB, (steps, row.query_tokens), generator=generator)
            for row, steps in zip(plan.rows, plan.steps_per_window, strict=True)
        ]
        self._contexts = [
            self.program.compute_contexts(
                0, row, [torch.randint(0, VOCAB, (n,), generator=generator) for n in self.plan.row_contexts(row)]
            )
            for row in self.rows
        ]
        self.reference = [self.run("reference", row) for row in self.rows]
        self.loaded = [self.run("incumbent", row) for row in self.rows]

    def install(
        self, source: PartSource, params: Mapping[str, Value], settings: Mapping[str, Value] = AS_LOADED.settings
    ) -> None:
        """On side `candidate`. Raises CandidateFailed."""
        declared = declaration(source)
        use = declared.bind(source, params)
        part = compile_part(use)
        matching = [slot.name for claim in declared.claims for slot in self.program.slots().matching(claim)]
        derived = {slot: derive(part, self.weights.restricted(slot)) for slot in matching}
        part.forget()
        candidate = Candidate(parts=(use,), settings=settings)
        self.program.install("candidate", candidate, Artefacts(native=({},), derived=(derived,)), 0)

    def run(self, side: str, row: int) -> Ran:
        self.program.load_contexts(side, 0, row, self._contexts[row])
        out = torch.full((len(self._tokens[row]), self.plan.rows[row].num_seqs, VOCAB), float("nan"))
        reply = self.program.run_window(side, 0, row, WindowInputs(tokens=self._tokens[row], nonce="n"), out)
        if reply.failure is not None:
            raise AssertionError(f"{reply.failure.message}\n{reply.failure.detail}")
        return Ran(logits=out, activation=reply.activation)

    def error(self, ran: Ran, row: int) -> float:
        """Largest difference to the reference; NaN when anything is NaN."""
        return float((ran.logits - self.reference[row].logits).abs().max())

    def serves(self, source: PartSource, row: int) -> bool:
        item = self.plan.rows[row]
        return declaration(source).parsed_domain.serves(
            phase=item.phase,
            num_seqs=item.num_seqs,
            query_tokens=item.query_tokens,
            context=max(self.plan.row_contexts(row)),
        )


def bindings(source: PartSource) -> Iterator[dict[str, Value]]:
    """Every combination of a part's parameter values."""
    params = declaration(source).params
    for values in itertools.product(*params.values()):
        yield dict(zip(params, values, strict=True))
