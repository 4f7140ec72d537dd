"""The module engine: any torch.nn.Module with example inputs, in the processes and under the judge of the decoder engine.

    ModuleEngine ── rows are the examples, inputs are drawn by the judge, one cut: the whole module ──► Stable + Judge

What a language model has and a module has not: KV, text, serving with several clients. The slow tier calls the examples in random
order, one client, as often as their shares say.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from engines.decoder_engine import DecoderEngine, default_limits
from engines.judge.baselines import measure_baseline
from engines.judge.inputs import TokenSource, seed_of
from engines.judge.install import Builder
from engines.limits import ChildLimits
from engines.module.inputs import ExampleSpec, ModuleInputs
from engines.module.prepare import ModuleFacts, module_facts
from engines.program import ReplayRequest
from engines.stable import Recipe
from hotpass.errors import InputError, nearest
from hotpass.records.candidate import AS_LOADED, Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Agreement, BaselineMeasurement, Tier
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable

PROGRAM = "engines.module.program:ModuleProgram"
BASELINES = ("eager-no-grad", "compiled")
"""As `engines.module.program.BASELINES`, which needs torch's tree to be imported."""
SCORE_SECONDS = 15.0
"""As loaded needs about so long for the calls of a score; candidate and reference make them."""
SERVED_WORDS = 2
"""Of a request: a seed, and an answer."""
PRELOADED = ("transformers.models.bert.modeling_bert",)


class ModuleEngine(DecoderEngine):
    """Implements `engines.protocol.Engine` and `engines.protocol.MeasuresBaselines` for modules."""

    def __init__(
        self,
        name: str = "module-0",
        *,
        device: str = "",
        threads: int | None = None,
        seed: int = 0,
        cache_dir: str = "",
        builder: Builder | None = None,
        limits: ChildLimits | None = None,
        pool_sets: int = 4,
        window_ms: float = 20.0,
        aa_seconds: float = 4.0,
        audited_share: float = 0.05,
    ) -> None:
        """As `DecoderEngine`, without what concerns text and traffic."""
        super().__init__(
            name, device=device, threads=threads, seed=seed, cache_dir=cache_dir, builder=builder, limits=limits,
            program=PROGRAM, requests=_requests, pool_sets=pool_sets, window_ms=window_ms, aa_seconds=aa_seconds, audited_share=audited_share,
        )  # fmt: skip

    def baselines(self) -> Sequence[str]:
        """The module called under no_grad, and through torch.compile."""
        return BASELINES

    def measure_baseline(
        self, name: str, rows: Sequence[ShapeRow], seed: int, deadline_seconds: float
    ) -> BaselineMeasurement:
        if name not in BASELINES:
            raise InputError("baseline", name, "is not known", nearest(name, list(BASELINES)))
        places = [(0, self._row_index(row)) for row in rows]
        return measure_baseline(self._loaded, self._environment, name, places, seed, deadline_seconds)

    def score(self, candidate: Candidate, texts: int, tokens_per_text: int, seed: int, noise_abs: float) -> Agreement:
        """Held-out calls in place of tokens, as many as `SCORE_SECONDS` allow: a call of a module may take as long as a whole text."""
        affordable = int(SCORE_SECONDS / max(1e-6, texts * self._call_seconds()))
        return super().score(candidate, texts, max(1, min(tokens_per_text, affordable)), seed, noise_abs)

    def _call_seconds(self) -> float:
        """Of as loaded, by the examples' shares, from the pair child's A/A."""
        known = self._loaded.pair().beside_itself
        rows = enumerate(self._loaded.recipe.rows)
        times = [(row.steps_share, known.get((AS_LOADED.id, (0, index)))) for index, row in rows]
        return sum(share * statistics.median(seconds) for share, seconds in times if seconds)

    def _cuts(self, deployment: Deployment, tier: Tier) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(deployment.model.num_layers)),)

    def _recipe(self, deployment: Deployment, cuts: tuple[tuple[int, ...], ...]) -> Recipe:
        facts = module_facts(deployment.model)
        _check_rows(deployment.shapes.rows, facts)
        device = self._device or deployment.hardware.device

        def sources(seed: int, held_out: bool) -> TokenSource:
            return ModuleInputs(facts.examples, seed_of(seed, held_out))

        return Recipe(
            program=self._program,
            preload=(),
            preload_optional=PRELOADED if "transformers" in facts.recipe.text else (),
            search_path=facts.recipe.search_path,
            model=deployment.model,
            device=device,
            threads=self._threads,
            cuts=cuts,
            rows=deployment.shapes.rows,
            serving_slots=0,
            serving_context=SERVED_WORDS,
            widths=tuple(example.width for example in facts.examples),
            limits=self._limits or default_limits(device),
            sources=sources,
            seed=self._seed,
            pool_sets=self._pool_sets,
            window_seconds=self._window_seconds,
            aa_seconds=self._aa_seconds,
        )


def _requests(count: int, seed: int, held_out: bool) -> Sequence[ReplayRequest]:
    """Calls for the slow tier: of each the seed of its inputs, and one answer."""
    rng = random.Random(seed_of(seed, held_out, "calls"))
    return [ReplayRequest(request_id=index, tokens=(rng.getrandbits(62),), output_tokens=1) for index in range(count)]


def module_shapes(examples: Sequence[ExampleSpec]) -> ShapeTable:
    """The examples as rows. What a deployment counts as output tokens are items here: so many of the batch a call."""
    items = sum(example.share * example.batch for example in examples)
    rows = [
        ShapeRow(
            phase=Phase.FORWARD,
            num_seqs=example.batch,
            query_tokens=example.batch * example.length,
            context_mean=0,
            context_max=0,
            steps_share=example.share,
            tokens_share=example.share * example.batch / items,
            name=example.name,
        )
        for example in examples
    ]
    return ShapeTable(
        rows=tuple(rows), concurrency=1, chunk_tokens=0, num_steps=len(rows), output_tokens_per_step=items
    )


def _check_rows(rows: Sequence[ShapeRow], facts: ModuleFacts) -> None:
    known = [row.key for row in module_shapes(facts.examples).rows]
    if [row.key for row in rows] != known:
        raise InputError("shapes", [row.key for row in rows], "are not the module's examples", f"use {known}")
