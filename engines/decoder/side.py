"""One side of one cut: its own module tree over the shared weights, its own KV pool, and what is installed on it.

    run(batch) ──► forward of the part that claims `model`, where its domain serves ──► else the reference through the tree

Two sides share weight tensors and nothing else, so nothing is patched between two windows. What decides what goes onto a side is
`install`; who runs it is `windows` and `serve`.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from engines.decoder.batch import Batch, build_batch
from engines.decoder.kv import KvPool
from engines.decoder.own_cache import OwnCache
from engines.decoder.reference import Net
from engines.decoder.source import failed
from engines.decoder.structure import Facts, Structure
from engines.program import KvPlan
from hotpass.records.candidate import AS_LOADED, Candidate, Value
from hotpass.records.measurement import FailureKind
from hotpass.settings import DEFAULTS

if TYPE_CHECKING:
    from engines.decoder.graphs import GraphedRows

Forward = Callable[[Batch, KvPool], torch.Tensor]
TRIAL_TOKENS = 8
LONG_SECONDS = 10.0
"""Foreseen of a prompt, by as many tokens as take hardly longer than one where weights are what is waited for."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(kw_only=True, slots=True)
class Installed:
    """What is on a side beyond the deployment as loaded, and how to take it off."""

    candidate: Candidate
    undo: ExitStack
    """Closing it restores the side, last step first."""
    counts: dict[str, int]
    """Claimed slot → calls of a part since the last reset."""


class DecoderSide:
    """A named side of one cut of the model."""

    takes: frozenset[str] = frozenset(DEFAULTS)
    """Settings that mean something here."""

    def __init__(self, name: str, net: Net, kv: KvPool, plan: KvPlan, threads: int, own: OwnCache | None) -> None:
        self.name = name
        self.net = net
        self.kv = kv
        self.kv_memory = kv.memory()
        """That of the pool that the engine gave it."""
        self.plan = plan
        self.own = own
        """Set when the tree runs with transformers' own cache."""
        self.step = net.step
        self.loaded_threads = threads
        self.threads = threads
        self.settings: dict[str, Value] = dict(DEFAULTS)
        self.environment: dict[str, str] = {}
        """Variables that hold while this side runs (compile caches of its candidate)."""
        self.installed: Installed | None = None
        self.as_loaded: Forward = net.forward if own is None else own.forward
        self.forward: Forward = self.as_loaded
        self.graphs: GraphedRows | None = None
        """Replays a captured step; answers None for a batch that was not captured."""
        self._templates: dict[int, Batch] = {}
        self._structure = Structure(net.modules.values())
        self.born = self.structure()

    @property
    def vocab_size(self) -> int:
        return int(self.net.config.vocab_size)

    @property
    def device(self) -> torch.device:
        return next(self.net.model.parameters()).device

    def structure(self) -> Facts:
        """What the side is made of: as loaded it is the same for its life."""
        return (self.forward == self.as_loaded, self.keeps_its_kv, *self._structure.facts())

    @property
    def keeps_its_kv(self) -> bool:
        """Whether its KV is still the pool, and in the memory, that the engine gave it."""
        return self.step.kv is self.kv and self.kv.memory() == self.kv_memory

    def activate(self) -> None:
        """Make this process-wide state the side's: threads, and the environment of its candidate."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        for name, value in self.environment.items():
            os.environ[name] = value

    def run(self, batch: Batch) -> torch.Tensor:
        """One step. Raises CandidateFailed when the answer is not logits; what a part raises passes through."""
        if self.graphs is not None:
            replayed = self.graphs(batch)
            if replayed is not None:
                return replayed
        self.step.begin(batch)
        return checked_logits(self.forward(batch, self.kv), batch.num_seqs, self.vocab_size, self.device)

    def row_batch(self, row: int, step: int, tokens: torch.Tensor) -> Batch:
        """The batch of one step of a row: decode goes on by one position each step, the others repeat theirs."""
        plan = self.plan
        if plan.rows[row].phase == "decode":
            contexts = tuple(context + step for context in plan.row_contexts(row))
            return build_batch(
                tokens, contexts=contexts, query_lens=plan.row_query_lens(row), slots=plan.row_slots(row)
            )
        if row not in self._templates:
            self._templates[row] = build_batch(
                tokens,
                contexts=plan.row_contexts(row),
                query_lens=plan.row_query_lens(row),
                slots=plan.row_slots(row),
            )
        return dataclasses.replace(self._templates[row], tokens=tokens)

    def blank_step(self, row: int) -> torch.Tensor:
        """What one step of a row takes, of no meaning: for warming up."""
        return torch.zeros(self.plan.rows[row].query_tokens, dtype=torch.int64, device=self.device)

    def width(self, row: int) -> int:
        """Values of one sequence's answer on a row."""
        return self.plan.width(row, self.vocab_size)

    def reset_counts(self) -> None:
        if self.installed is not None:
            for slot in self.installed.counts:
                self.installed.counts[slot] = 0

    def counts(self) -> Mapping[str, int]:
        return dict(self.installed.counts) if self.installed is not None else {}

    @property
    def candidate(self) -> Candidate:
        """What answers here."""
        return self.installed.candidate if self.installed is not None else AS_LOADED

    def replace_kv(self, kv: KvPool) -> None:
        """Another pool; contexts must be loaded again."""
        self.kv, self.kv_memory = kv, kv.memory()
        self.step.kv = kv

    def load_contexts(self, row: int, contexts: Sequence[torch.Tensor]) -> None:
        """A row's contexts: KV as `KvPool.read` gives it, or token ids (int64 [context]) for this side's own prefill."""
        slots = self.plan.row_slots(row)
        if self.own is not None:
            self.activate()
            self.own.load_contexts(slots, self.plan.row_query_lens(row), self.plan.steps_per_window[row], contexts)
            self._warm_row(row)
            return
        with torch.inference_mode():
            for slot, context in zip(slots, contexts, strict=True):
                if context.ndim == 1 and len(context):
                    ids = context.to(self.device)
                    self.run(build_batch(ids, contexts=[0], query_lens=[len(ids)], slots=[slot]))
                elif context.ndim > 1:
                    self.kv.write(slot, context)

    def _warm_row(self, row: int) -> None:
        """Steps of a row, once its caches exist; compiled code must have met them before the first window. Not where a few tokens of a
        prompt say that the whole of it takes many seconds: what a first pass costs beyond others is nothing beside that."""
        eager = self.installed is None and self.own is not None and self.own.compiled is None
        if eager and self._foreseen_seconds(row) > LONG_SECONDS:
            return
        tokens = torch.zeros(self.plan.rows[row].query_tokens, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            for step in range(min(2, self.plan.steps_per_window[row])):
                self.run(self.row_batch(row, step, tokens))

    def _foreseen_seconds(self, row: int) -> float:
        """Of a prompt of a row, by the pass of its first tokens; 0 for short ones."""
        queries = self.plan.row_query_lens(row)
        if min(queries) < 2 * TRIAL_TOKENS or len(set(queries)) > 1:
            return 0.0
        batch = build_batch(
            torch.zeros(TRIAL_TOKENS * len(queries), dtype=torch.int64, device=self.device),
            contexts=self.plan.row_contexts(row),
            query_lens=[TRIAL_TOKENS] * len(queries),
            slots=self.plan.row_slots(row),
        )
        start = time.perf_counter()
        with torch.inference_mode():
            self.run(batch)
        return (time.perf_counter() - start) * queries[0] / TRIAL_TOKENS

    def free_slot(self, slot: int, *, poison: bool = False) -> None:
        """A request has left its slot. Poisoning makes its KV NaN."""
        if self.own is not None:
            self.own.drop(slot)
        elif poison:
            self.kv.poison([slot])

    def drop_templates(self) -> None:
        """Forget batches that code on this side has seen, and may have written to."""
        self._templates.clear()

    def uninstall(self) -> None:
        """The side as loaded. Restores everything even when a part's close raises; then that is raised."""
        installed, self.installed = self.installed, None
        if installed is not None:
            installed.undo.close()


def checked_logits(logits: Any, num_seqs: int, vocab: int, device: torch.device) -> torch.Tensor:
    """The logits, proven to be a plain tensor with memory of its own. Raises CandidateFailed (protocol)."""
    if type(logits) is not torch.Tensor:
        raise failed(FailureKind.PROTOCOL, f"the forward returned {type(logits).__name__}, not a plain torch.Tensor")
    if logits.shape != (num_seqs, vocab):
        raise failed(FailureKind.PROTOCOL, f"logits have shape {tuple(logits.shape)}, not {(num_seqs, vocab)}")
    if logits.dtype not in FLOATS:
        raise failed(FailureKind.PROTOCOL, f"logits are {logits.dtype}, not a floating type")
    if logits.layout != torch.strided or logits.device != device or logits.untyped_storage().data_ptr() == 0:
        raise failed(FailureKind.PROTOCOL, f"logits are not in memory on {device}")
    return logits
