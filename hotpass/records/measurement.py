"""What an engine is asked to do, and what it answers. All of it is plain data that crosses processes; no tensor does.

Assignment ──► Engine.measure ──► MeasureResult(blocks | replays, checks, activation, clean, phases, failure)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hotpass.records.candidate import Candidate, Numerics, Reload
from hotpass.records.shapes import ShapeRow


class Tier(StrEnum):
    """*fast*: cuts or the whole model on fixed inputs · *slow*: the whole model, replaying real traffic."""

    FAST = "fast"
    SLOW = "slow"


class Purpose(StrEnum):
    """Why a measurement is made; part of its key, so that the same thing may be measured again for another purpose."""

    SEARCH = "search"
    REMEASURE = "remeasure"
    COLD = "cold"
    AUDIT = "audit"
    AA = "aa"


class Pairing(StrEnum):
    """How the two sides of a pair live."""

    SIDE_BY_SIDE = "side-by-side"
    """Both installed in one child process."""
    ALTERNATING = "alternating"
    """One child, sides exchanged between windows (memory does not hold both)."""
    TWO_ENGINES = "two-engines"
    """Each side in a child process of its own, which the other never enters, windows interleaved. They share the sealed weights alone."""
    TWO_PROCESSES = "two-engines"
    """An earlier name of `two-engines`; in logs written before that, `two-processes`."""

    @classmethod
    def _missing_(cls, value: object) -> Pairing | None:
        return cls.TWO_ENGINES if value == "two-processes" else None


class Side(StrEnum):
    INCUMBENT = "incumbent"
    CANDIDATE = "candidate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping:
    """When a pair has been measured enough. Error rates are those of `hotpass.stats.SequentialTest`."""

    alpha: float = 0.02
    """Probability of claiming any effect when there is none, over all looks."""
    min_rounds: int = 3
    max_rounds: int = 40
    half_width: float = 0.02
    """Stop once the interval of the log ratio is this narrow on both sides, decided or not."""
    equal_margin: float = 0.01
    """Stop for futility once the whole interval lies within ± this."""
    hopeless: float | None = None
    """Give up, undecided, once the mean log ratio is below minus this, whatever the interval; None: never. It ends only losers, so no
    claim of `faster` becomes more likely by it."""
    far_behind: float | None = None
    """Leave out rows with long windows, and prompts, for a candidate whose log ratio is below minus this even if they took it no time; what
    is tested then is that bound (`MeasureResult.at_most`). None: every row is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One order to one engine."""

    incumbent: Candidate
    candidate: Candidate
    tier: Tier
    purpose: Purpose
    rows: tuple[ShapeRow, ...]
    """Rows to measure; for the slow tier, the table that the replayed traffic came from."""
    seed: int
    """Inputs are drawn from this; a cold measurement gets one that was never used before."""
    deadline_seconds: float
    """From the start of install to the last reply; beyond it the child is killed and the result has a Failure."""
    pairing: Pairing = Pairing.SIDE_BY_SIDE
    stopping: Stopping = field(default_factory=Stopping)
    replay_requests: int = 0
    """Slow tier: requests in one replay; 0 lets the engine choose by its budget."""


class FailureKind(StrEnum):
    """How a candidate failed. None of these is the machine's fault."""

    BUILD = "build"
    INSTALL = "install"
    EXCEPTION = "exception"
    CRASH = "crash"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    PROTOCOL = "protocol"
    """The child answered something that is not an answer (wrong shape, wrong epoch, a tensor subclass)."""
    DISTURBED = "disturbed"
    """The incumbent did not come to its end beside the candidate: no failure of the candidate's own run, and no measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    kind: FailureKind
    message: str
    """One sentence: exception type and text, signal name, or what the deadline caught."""
    detail: str = ""
    """The tail of the traceback or of the compiler's output, at most 4,000 characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBlock:
    """One block over one shape row: ABBA or BAAB, and AB or BA where a window is long. Times are per step, by the judge's clock."""

    row: ShapeRow
    round_index: int
    order: str
    """`ABBA`, `BAAB`, `AB` or `BA`, by chance; A is the incumbent."""
    incumbent_ms: tuple[float, ...]
    """Of each of its windows, in their order."""
    candidate_ms: tuple[float, ...]
    steps_per_window: int
    child_clock_ratio: float
    """Child's time over judge's time: of each side the window nearer to 1, and of these the worse. Near 1 unless somebody lies: a
    hiccup of the machine hits one window, a lie both."""
    layers: int
    """Depth of the model that this block ran (fast tier: that of the cut)."""
    incumbent_clock_ratio: float = 1.0
    """The same of the incumbent's windows alone: what the machine made of an honest child's word meanwhile."""

    @property
    def log_ratio(self) -> float:
        """log(incumbent time ÷ candidate time), geometric over the windows: above 0 the candidate is faster."""
        return math.log(self.incumbent_step_ms / self.candidate_step_ms)

    @property
    def incumbent_step_ms(self) -> float:
        """Geometric mean over its windows."""
        return math.prod(self.incumbent_ms) ** (1 / len(self.incumbent_ms))

    @property
    def candidate_step_ms(self) -> float:
        return math.prod(self.candidate_ms) ** (1 / len(self.candidate_ms))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayStats:
    """One replay of requests through the continuous-batching loop, by the judge's clock."""

    num_requests: int
    output_tokens: int
    wall_seconds: float
    ttft_ms: tuple[float, ...]
    """Time to first token of each request."""
    tpot_ms: tuple[float, ...]
    """Mean time per output token after the first, of each request with at least two."""
    steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.wall_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredReplay:
    """One ABBA block of replays of the same requests."""

    round_index: int
    order: str
    incumbent: tuple[ReplayStats, ReplayStats]
    candidate: tuple[ReplayStats, ReplayStats]

    @property
    def log_ratio(self) -> float:
        """log of tokens/s of the candidate over the incumbent, geometric over the pair."""
        a = [math.log(stats.tokens_per_second) for stats in self.incumbent]
        b = [math.log(stats.tokens_per_second) for stats in self.candidate]
        return (sum(b) - sum(a)) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputCheck:
    """Logits of one timed window held against a reference. All maxima are over [steps, num_seqs, vocab]."""

    row: ShapeRow
    against: str
    """`reference` (the file's own values in fp32, other process), `incumbent` or `loaded` (the same inputs), or `kv`: what as loaded
    answers on the KV that the candidate left, held against the candidate's own last answer."""
    max_abs: float
    """Largest absolute difference; infinity when either side has a non-finite value."""
    rms: float
    """Root mean square difference."""
    reference_rms: float
    """Root mean square of the reference logits about their row mean."""
    worst_row_rms: float
    """The largest per-row (step, sequence) root mean square difference: one wrong row shows here."""
    bit_equal: bool
    positions: int
    """Rows of logits compared."""
    argmax_agree: int
    """Positions where the greedy token agrees."""
    argmax_clear: int
    """Positions where the reference's margin exceeds twice max_abs noise (`noise_abs` given by the caller), so that it must."""
    argmax_clear_agree: int
    kl_mean: float
    """Mean KL divergence of softmax(reference) to softmax(candidate), nats."""
    argmax_decided: int = 0
    """Positions where the reference's margin exceeds a tenth of its logits' scale, so that a small loss of precision changes none."""
    argmax_decided_agree: int = 0
    argmax_near: int | None = None
    """Positions where the greedy token is the reference's best, or below it by at most that tenth; None where it was not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCheck:
    """Tokens that a candidate served in replays, held against the reference's logits at the same places."""

    regrets: tuple[float, ...]
    """For each token checked, how far its logit by the reference lies below the reference's largest; 0 where they agree."""
    reference_rms: float
    """Root mean square of those reference logits about their row mean."""

    @property
    def agree(self) -> int:
        """Tokens that are the reference's own choice."""
        return sum(regret == 0.0 for regret in self.regrets)


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanReport:
    """Whether a child was proven clean after a candidate was taken out."""

    clean: bool
    reasons: tuple[str, ...] = ()
    """What was found changed (`threads 2 -> 1`, `fingerprint differs`, `thread alive: x`), empty when clean."""
    child_replaced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReloadReport:
    """What one install cost, by phase, and what it turned out to be."""

    candidate_id: str
    side: Side
    declared: Reload
    actual: Reload
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    """`build`, `weights`, `source`, `prepare`, `swap`, `warm-up`, `fork`, … in ms."""
    slots: tuple[str, ...] = ()
    """Concrete slots that the candidate's parts now serve."""
    derived_bytes: int = 0
    """Bytes of derived weights attached."""

    @property
    def understated(self) -> bool:
        """Whether the reload was costlier than declared."""
        return self.actual.rank > self.declared.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class ReloadProof:
    """Whether a candidate put over another one answers as in a process that saw nothing else, and whether the other comes back."""

    before_id: str
    candidate_id: str
    epoch: str
    """Of the weights."""
    windows: int
    """Windows compared, of every row on every cut."""
    warm_cold_max_abs: float
    """Largest difference of warm before→candidate from the cold candidate; 0 when every bit is equal, infinity for NaN."""
    back_max_abs: float
    """The same of before→candidate→before from the first before."""
    texts_equal: bool
    """Generated tokens, warm and cold."""

    @property
    def holds(self) -> bool:
        """Equal bit for bit."""
        return self.warm_cold_max_abs == 0.0 and self.back_max_abs == 0.0 and self.texts_equal

    @property
    def reason(self) -> str:
        """Why it does not hold; empty when it does."""
        found = []
        if self.warm_cold_max_abs != 0.0:
            found.append(f"after another candidate it answers otherwise than cold (by {self.warm_cold_max_abs:.2g})")
        if self.back_max_abs != 0.0:
            found.append(f"what was there before does not come back (off by {self.back_max_abs:.2g})")
        if not self.texts_equal:
            found.append("it generates another text than cold")
        return "; ".join(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What must be equal for two measurements to be compared (FAILURES R8, R9)."""

    hardware_id: str
    threads: int
    thread_env: Mapping[str, str]
    """OMP_*, MKL_*, KMP_*, GOMP_* as set by the engine."""
    versions: Mapping[str, str]
    """python, torch, transformers, hotpass, compiler, kernel."""
    cuda_visible_devices: str = ""

    @property
    def fingerprint(self) -> str:
        from hotpass.canonical import content_hash

        return content_hash(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuConditions:
    """What a GPU did while an assignment was measured, by looks between rounds."""

    samples: int
    sm_clock_mhz: tuple[int, int]
    """Least and most."""
    memory_clock_mhz: tuple[int, int]
    """Least and most."""
    temperature_max_c: int
    power_max_watts: int
    """0 where the GPU does not tell."""
    limited_by: tuple[str, ...]
    """Why clocks were below the highest (`software power cap`, …), idling left out."""
    rounds_repeated: int
    """Because heat or the power supply slowed the GPU down in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureResult:
    """All that came of an assignment. `failure` set means that the candidate did not finish; blocks may be partial."""

    assignment: Assignment
    engine: str
    """Name of the engine that measured."""
    epoch: str
    """Weights epoch echoed by the child (hash of what is loaded)."""
    environment: Environment
    pairing: Pairing | None = None
    """How the sides lived: as ordered, or alternating where memory did not hold both. None where the engine does not say."""
    blocks: tuple[MeasuredBlock, ...] = ()
    replays: tuple[MeasuredReplay, ...] = ()
    checks: tuple[OutputCheck, ...] = ()
    tokens: TokenCheck | None = None
    """Of the slow tier; None where no replay of the candidate was finished, or nothing was replayed."""
    activation: Mapping[str, int] = field(default_factory=dict)
    """Slot → calls of a part of the candidate in timed windows; every claimed slot is a key, 0 means never ran."""
    reloads: tuple[ReloadReport, ...] = ()
    clean: CleanReport | None = None
    """None when no restore was tried (the child is discarded anyway)."""
    incumbent_disturbed: float = 1.0
    """Incumbent's time beside the candidate ÷ beside itself: geometric over the windows of a row and weighted over rows, as the speed."""
    disturbed_low: float | None = None
    """Lower bound of that ratio (one-sided, 99 %), by the noise of windows that no disturbance is in; None where the engine gives none."""
    noise_floor: float = 0.0
    """Standard deviation of A/A block log-ratios at this child's birth."""
    at_most: tuple[float, ...] = ()
    """For each round the speedup if the rows without a block had cost the candidate nothing, and the incumbent what they do beside itself:
    so far behind that they were not measured. Empty where every row was."""
    weights_unchanged: bool = True
    gpu: GpuConditions | None = None
    """None on a CPU."""
    simulated: bool = False
    """True for the fake engine only: nothing here was measured."""
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    """`build`, `alone`, `install`, `first result` (the candidate's first window), `measure`, `restore`, `clean`, …; `birth/…`: of
    children born for this measurement, outside `total`."""
    failure: Failure | None = None


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"
    INCORRECT = "incorrect"
    INVALID = "invalid"
    FAILED = "failed"

    @property
    def is_timed(self) -> bool:
        """True when the attempt has a trustworthy time."""
        return self in (Verdict.FASTER, Verdict.SLOWER, Verdict.INCONCLUSIVE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A ratio with its interval."""

    value: float
    low: float
    high: float
    level: float = 0.95
    kind: str = "measured"
    """`measured`, `simulated`, `predicted`, or `bound`: the value is the most that it can be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One candidate on one tier, judged."""

    candidate_id: str
    incumbent_id: str
    tier: Tier
    purpose: Purpose
    verdict: Verdict
    reason: str
    """Why, in one sentence with the evidence."""
    speedup: Estimate | None
    """Over the incumbent, deployment-weighted; None unless `verdict.is_timed`."""
    tokens_per_second: float | None
    """Of the candidate, over the shape table (fast) or by replay (slow)."""
    gates: Mapping[str, str] = field(default_factory=dict)
    """Gate → `pass`, `fail: …` or `not run: …`."""
    numerics_measured: Mapping[str, float] = field(default_factory=dict)
    """max_abs, rms, relative_rms, argmax_agreement, kl_mean over the checks against the reference."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """`ttft` and `tpot` of the incumbent over those of the candidate, point estimates; absent where not measured."""
    rounds: int = 0
    seconds: float = 0.0
    """Engine seconds that it took, reload included."""

    def __post_init__(self) -> None:
        if self.verdict.is_timed and self.speedup is None:
            raise ValueError(f"an attempt that is {self.verdict} has a speedup")
        if not self.verdict.is_timed and self.speedup is not None:
            raise ValueError(f"an attempt that is {self.verdict} has no speedup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Greedy agreement of one side with the reference on real text, teacher-forced through the side's own loop."""

    texts: int
    positions: int
    agree: int
    """Positions where the greedy token is the reference's."""
    clear: int
    """Positions where the reference's margin is more than twice `noise_abs`, so that an honest side must agree."""
    clear_agree: int
    noise_abs: float
    """The logit noise that `clear` was decided with."""
    max_abs: float
    """Largest absolute logit difference over all positions; infinity when anything was not finite."""
    kl_mean: float
    """Mean KL divergence of reference to side, nats."""
    bit_equal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineMeasurement:
    """A baseline (transformers' own loop, …) paired with the deployment as loaded in the same session."""

    name: str
    """As `transformers-eager-fp32`."""
    numerics: Numerics
    """Its class relative to the reference, on this deployment."""
    blocks: tuple[MeasuredBlock, ...] = ()
    """Incumbent = as loaded, candidate = the baseline."""
    checks: tuple[OutputCheck, ...] = ()
    environment: Environment | None = None
    failure: Failure | None = None
