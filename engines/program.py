"""What a child process runs: the interface between the processes of an engine and the code that knows models.

    judge ──request──► child loop ──► Program method ──► reply ──► judge

Programs know nothing of sockets, clocks of record, or verdicts. The decoder's is `engines.decoder.program.DecoderProgram`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hotpass.records.candidate import Candidate
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import Failure, ReloadReport
from hotpass.records.shapes import Phase, ShapeRow
from hotpass.records.slots import SlotTable

if TYPE_CHECKING:
    import torch

    from engines.prepare.store import WeightStore


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlan:
    """How a program lays out its KV slots: each shape row has slots of its own, the serving loop has the rest."""

    rows: tuple[ShapeRow, ...]
    steps_per_window: tuple[int, ...]
    """Decode steps (or prefill repetitions) of one window, for each row."""
    serving_slots: int
    """Slots for replay and generation."""
    serving_context: int
    """Longest sequence in those, prompt and output."""
    widths: tuple[int, ...] = ()
    """Of a module's rows: values of the answer to one item of the batch. Empty for a decoder, whose answers are logits."""

    @property
    def keeps_kv(self) -> bool:
        """Whether a step leaves something that a later one reads."""
        return not self.widths

    def width(self, row: int, vocab: int) -> int:
        """Values of one sequence's answer on a row."""
        return self.widths[row] if self.widths else vocab

    def row_slots(self, row: int) -> range:
        """Slots of a row."""
        start = sum(item.num_seqs for item in self.rows[:row])
        return range(start, start + self.rows[row].num_seqs)

    def row_contexts(self, row: int) -> tuple[int, ...]:
        """Context length of each sequence of a row: alternating about the mean so that the longest is context_max."""
        item = self.rows[row]
        if item.num_seqs == 1 or item.context_max <= item.context_mean:
            return (item.context_mean,) * item.num_seqs
        spread = item.context_max - item.context_mean
        n = item.num_seqs
        offsets = [round(spread * (1 - 2 * index / (n - 1))) for index in range(n)]
        return tuple(max(0, item.context_mean + offset) for offset in offsets)

    def row_query_lens(self, row: int) -> tuple[int, ...]:
        """Tokens that each sequence of a row computes in one step: in a mixed row the last sequence has the prefill, the
        others decode; else they share the row's tokens evenly, earlier sequences first."""
        item = self.rows[row]
        if item.phase == Phase.MIXED and item.num_seqs > 1:
            return (1,) * (item.num_seqs - 1) + (item.query_tokens - item.num_seqs + 1,)
        each, more = divmod(item.query_tokens, item.num_seqs)
        return tuple(each + (1 if index < more else 0) for index in range(item.num_seqs))

    @property
    def num_slots(self) -> int:
        return sum(row.num_seqs for row in self.rows) + self.serving_slots

    @property
    def max_context(self) -> int:
        """Positions of a slot, rounded up to 64."""
        needs = [self.serving_context]
        for index, row in enumerate(self.rows):
            repeats = max(1, self.steps_per_window[index]) if row.phase == Phase.DECODE else 1
            lengths = zip(self.row_contexts(index), self.row_query_lens(index), strict=True)
            needs.append(max(context + query * repeats for context, query in lengths))
        return -(-max(needs) // 64) * 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Artefacts:
    """What builders made for a candidate; one entry a part, in the order of `candidate.parts`."""

    native: tuple[Mapping[str, str], ...] = ()
    """Library name → path of a shared library."""
    derived: tuple[Mapping[str, Mapping[str, torch.Tensor]], ...] = ()
    """Concrete slot → name → derived tensor (read-only views of the keeper's memory)."""
    compiled: str = ""
    """Folder of what compilers made of the candidate, read-only (`engines.compile_cache`); empty: the child compiles by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowInputs:
    """Fresh inputs of one window."""

    tokens: torch.Tensor
    """int64 [steps, query_tokens]: the tokens of each step, sequence after sequence."""
    nonce: str
    """Echoed in the reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """Who answers, by the program's own book. The judge has a book too, and rejects an answer of anyone else."""

    candidate_id: str
    """Of what is on the side; that of as loaded where nothing is."""
    epoch: str
    """Of the weights: the keeper's hash, as `load` got it with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowReply:
    nonce: str
    seconds: float
    """The child's own clock, around the steps."""
    steps: int
    activation: Mapping[str, int] = field(default_factory=dict)
    """Slot → calls of a part in this window."""
    compile_events: int = 0
    """Compilations or captures that happened inside the window: must be 0."""
    failure: Failure | None = None
    device_seconds: float = 0.0
    """By a GPU's events around the same steps; 0 on a CPU."""
    echo: Echo | None = None
    """Added by the child (`Program.echo`); None in a notebook."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReply:
    """The end of a replay."""

    activation: Mapping[str, int]
    """Slot → calls of a part over all its steps."""
    echo: Echo


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    request_id: int
    tokens: tuple[int, ...]
    """Prompt token ids."""
    output_tokens: int
    """Exactly this many are generated; end-of-sequence is ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One step of the serving loop, emitted as it ends; the judge stamps it on arrival."""

    step: int
    finished_tokens: tuple[tuple[int, int], ...]
    """(request_id, token id) made by this step."""
    phase: str
    num_seqs: int
    query_tokens: int
    child_seconds: float
    """The child's clock since the replay began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """State of a child that a candidate must leave as it was."""

    probes: Mapping[str, str]
    """What answered a fixed probe (as `layers 2 to 3`) → SHA-256 of the baseline's logits. At birth everything that can answer has;
    later some of it."""
    flags: Mapping[str, str]
    """torch flags, default dtype, threads, grad mode, random state hash, patched callables, environment hash."""
    threads_alive: int
    children_alive: int
    resident_bytes: int
    open_files: int
    device_bytes: int = 0
    """Of a GPU's memory, in live tensors and captured graphs; 0 on a CPU."""


class CandidateFailed(Exception):
    """A candidate's own fault, inside a child; carries the `Failure` that becomes its row."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)

    def __reduce__(self) -> tuple[type, tuple[Failure]]:
        return (type(self), (self.failure,))


class Program(Protocol):
    """Runs in one child. `side` is `incumbent`, `candidate` or `reference`; `cut` indexes the cuts given to `load`."""

    def load(
        self,
        model: ModelRef,
        weights: WeightStore,
        cuts: Sequence[tuple[int, ...]],
        device: str,
        threads: int,
        plan: KvPlan,
    ) -> dict[str, float]:
        """Build skeletons over shared weights. Returns phases in ms (`skeleton`, `weights`, `kv`, `warm-up`)."""
        ...

    def slots(self) -> SlotTable: ...

    def install(
        self,
        side: str,
        candidate: Candidate,
        artefacts: Artefacts,
        cut: int,
        rows: Sequence[int] | None = None,
    ) -> ReloadReport:
        """Raises CandidateFailed. Ends with a warm-up, outside any window: of every row of the plan and of the serving loop, or of some
        rows alone; the first window of any other row is then the caller's to discard."""
        ...

    def uninstall(self, side: str) -> None:
        """The side as loaded again, on every cut; parts closed, their memory free."""
        ...

    def compute_contexts(self, cut: int, row: int, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """By the reference: for each sequence of the row, KV of its context, float32 [layers, 2, kv_heads, context, head_dim]."""
        ...

    def load_contexts(self, side: str, cut: int, row: int, contexts: Sequence[torch.Tensor]) -> None: ...

    def run_window(self, side: str, cut: int, row: int, inputs: WindowInputs, out: torch.Tensor) -> WindowReply:
        """Run the steps; write every step's logits into `out` float32 [steps, num_seqs, vocab] before replying. Decode: step s writes
        position context + s. Prefill and mixed rows: each step recomputes the row's query tokens on top of the same context."""
        ...

    def echo(self, side: str, cut: int | None) -> Echo:
        """Who answers on a side of a cut; None is the cut that serves whole requests."""
        ...

    def replay(
        self, side: str, requests: Sequence[ReplayRequest], concurrency: int, emit: Callable[[StepEvent], None]
    ) -> Mapping[str, int]:
        """Closed loop of `concurrency` clients through continuous batching. Returns activation counts."""
        ...

    def generate(self, side: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]: ...

    def score(self, side: str, cut: int, tokens: Sequence[int], out: torch.Tensor) -> None:
        """Teacher-forced logits of every position of one text, through the side's own prefill and decode; float32 [len(tokens), vocab]."""
        ...

    def answer_from_kv(self, side: str, cut: int, row: int, tokens: Sequence[int], out: torch.Tensor) -> bool:
        """As loaded, on the KV that the side's last window of the row left: the answer to the last token of each sequence (`tokens`),
        into `out` float32 [1, num_seqs, vocab]. False where sides keep no KV that another could read."""
        ...

    def logits_at(
        self, side: str, cut: int, tokens: Sequence[int], positions: Sequence[int], out: torch.Tensor
    ) -> None:
        """Logits of some positions (ascending) of one text by prefill, into `out` float32 [len(positions), vocab]."""
        ...

    def state(self) -> Mapping[str, str]:
        """Those of the fingerprint's flags that may not differ even while a candidate is installed."""
        ...

    def fingerprint(self, whole: bool = False) -> Fingerprint:
        """`whole`: everything that can answer the probe does, as at birth; else at least some of it, another each time."""
        ...


@runtime_checkable
class ImagedProgram(Protocol):
    """A program whose contexts come back by a mapping of sealed memory, and not by a copy."""

    def context_image(self, cut: int, contexts: Mapping[int, Sequence[torch.Tensor]]) -> int | None:
        """Descriptor of the sealed image of a side that holds these contexts of each row; the caller closes it. None where there can
        be none: contexts are to be copied then."""
        ...

    def keep_image(self, cut: int, fd: int) -> None:
        """Take over an image that another child of the same plan made."""
        ...

    def cover(self, side: str, cut: int) -> bool:
        """Bring a side's contexts back, of every row. False where there is no image for it: they are to be copied then."""
        ...


class ProfiledProgram(Program, Protocol):
    """What a program adds when its steps can be looked into."""

    def profile(
        self, side: str, cut: int, row: int, slots: Sequence[str], tokens: torch.Tensor
    ) -> tuple[dict[str, Any], bytes]:
        """Plain figures of a row (`engines.profile_child`), and a Chrome trace. The child is not used for anything else afterwards."""
        ...
