"""What every engine is: the protocol that the fake, the decoder, the module and the vLLM engine implement.

Also the two things that cross into a part's code: `Batch` (one step's inputs) and `KvView` (the cache), as protocols of
plain attributes, so that a part can be tested without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hotpass.records.candidate import Candidate, Value
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import (
    Agreement,
    Assignment,
    BaselineMeasurement,
    MeasureResult,
    OutputCheck,
    ReloadProof,
    ReloadReport,
    Side,
    Tier,
)
from hotpass.records.profile import Profile
from hotpass.records.shapes import ShapeRow
from hotpass.records.slots import SlotTable

if TYPE_CHECKING:
    import torch


class Engine(Protocol):
    """A set of processes that has the weights loaded, stays up, and reloads candidates."""

    name: str

    def load(self, deployment: Deployment, tier: Tier) -> Mapping[str, float]:
        """Load once. Returns start-up time by phase, ms. Raises MachineError or InputError."""
        ...

    def slots(self) -> SlotTable: ...

    def install(self, side: Side, candidate: Candidate) -> ReloadReport:
        """Put a candidate on a side. A candidate's fault raises `CandidateFailed` (with a `Failure`), never anything else."""
        ...

    def measure(self, assignment: Assignment) -> MeasureResult:
        """Install both sides, measure until the stopping rule is met or the deadline, restore, prove clean. Never raises for a candidate's fault."""
        ...

    def generate(self, side: Side, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Greedy continuation of token-id prompts by what is installed on a side."""
        ...

    def restore(self) -> None:
        """Both sides as loaded."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ProvesReloads(Engine, Protocol):
    """What an engine adds when it can hold a candidate put over another one against the same candidate in a fresh process."""

    def verify_reload(self, before: Candidate, candidate: Candidate) -> ReloadProof:
        """Warm before→candidate against the cold candidate, and before→candidate→before against before. Raises CandidateFailed."""
        ...


@runtime_checkable
class Profiles(Engine, Protocol):
    """What an engine adds when it can say where the time of a candidate goes."""

    def profile(self, assignment: Assignment, trace_path: str = "") -> Profile:
        """The assignment's candidate on its rows of the whole model, in a child that is discarded afterwards, outside of any timed
        window. `trace_path`: where Chrome traces go, one a row; empty for none. Never raises for a candidate's fault."""
        ...


class Batch(Protocol):
    """Inputs of one step, flat and ragged. Tensors are int64 on the engine's device; the plain fields are host-side copies."""

    tokens: torch.Tensor
    """[T] token ids."""
    positions: torch.Tensor
    """[T] position of each token in its sequence = its place in the KV slot."""
    seq_starts: torch.Tensor
    """[num_seqs + 1] offsets into T; sequence i owns tokens[seq_starts[i]:seq_starts[i + 1]]."""
    slots: torch.Tensor
    """[num_seqs] KV slot of each sequence."""
    phase: str
    """`decode` when every sequence makes one token on top of a context, `prefill` when none does (with context or without), else `mixed`."""
    num_seqs: int
    query_tokens: int
    """T."""
    context: int
    """Longest context (tokens in the cache before this step)."""
    host_seq_starts: Sequence[int]
    host_contexts: Sequence[int]
    """[num_seqs] tokens in the cache before this step, of each sequence."""
    host_slots: Sequence[int]


class KvView(Protocol):
    """The KV cache of one side. Entry (slot, position) of a layer is written by the forward that computes that position."""

    num_layers: int
    num_slots: int
    max_context: int
    dtype: torch.dtype

    def keys(self, layer: int) -> torch.Tensor:
        """[num_slots, kv_heads, max_context, head_dim], rotary already applied (Llama family). Strides are fixed for the pool's life."""
        ...

    def values(self, layer: int) -> torch.Tensor: ...


class PartContext(Protocol):
    """What `prepare(self, ctx, params)` gets. Everything a part may keep a reference to."""

    weights: Mapping[str, torch.Tensor]
    """What the part's own `weights` returned for this slot, read-only shared memory on the CPU."""
    config: Any
    """The model's transformers configuration (num_hidden_layers is that of the cut)."""
    device: torch.device
    threads: int
    settings: Mapping[str, Value]
    native: Mapping[str, Any]
    """Library name → ctypes.CDLL, compiled by the builder."""
    slot: str
    """Concrete slot that this instance serves, as `model.layers.3.mlp`."""
    layer: int | None
    """Layer index in the slot's path, within this (possibly cut) model."""
    kv: KvView
    """The side's cache; the same object for its life, so pointers may be taken here."""
    step: Any
    """`.batch` and `.kv` of the step now running: how module-level parts learn the ragged layout."""

    def kept(self, name: str) -> Callable[..., Any]:
        """The child named in `keeps`, to be called by the part."""
        ...

    def reference(self) -> Callable[..., Any]:
        """The reference forward of this slot."""
        ...


@runtime_checkable
class MeasuresBaselines(Protocol):
    """What an engine adds when it can run a model's own serving loop as a side, and score texts."""

    def baselines(self) -> Sequence[str]:
        """Names that this engine can measure, as `transformers-eager-fp32`."""
        ...

    def measure_baseline(
        self, name: str, rows: Sequence[ShapeRow], seed: int, deadline_seconds: float
    ) -> BaselineMeasurement:
        """Pair a baseline with as loaded by the same windows. Never raises for the baseline's fault."""
        ...

    def score(self, candidate: Candidate, texts: int, tokens_per_text: int, seed: int, noise_abs: float) -> Agreement:
        """Agreement with the reference on held-out text. Raises CandidateFailed."""
        ...

    def reference_noise(self) -> Sequence[OutputCheck]:
        """The reference against itself in another order (threads, batch mix): what a correct reordering differs by."""
        ...

    def verify_weights(self) -> bool:
        """Full hash of the shared weights against the one at load."""
        ...
