"""Traffic by name, built from published statistics. No trace is bundled, and nothing here is random.

Lengths and gaps are read off published percentiles at the points of a low-discrepancy sequence, so the first n requests
of a preset are as representative as n requests can be, and equal on every machine. Input and output lengths are drawn
independently, since their joint distribution is not published. Between two percentiles the logarithm is linear.

Sources (percentiles over the whole public files):
  azure-2023   AzureLLMInferenceTrace_conv and _code, github.com/Azure/AzurePublicDataset, CC BY 4.0;
               Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024
  mooncake     FAST25-release/traces/conversation_trace.jsonl, github.com/kvcache-ai/Mooncake, Apache-2.0;
               Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025
  tracelab     github.com/uw-syfi/TraceLab, June 2026, 357,161 rounds of coding agents, CC BY 4.0
  agentx       session parameters of the generator in agentx-harness 1.0.12 (PyPI, Apache-2.0): not measured traffic
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hotpass.traffic.records import Request

Percentiles = Mapping[float, float]
"""Percentile (0 to 100) → value, ascending."""

NUM_REQUESTS = 1000
"""Of each preset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Published statistics, and how requests are made of them."""

    name: str
    note: str
    """Source, for people."""
    input_tokens: Percentiles
    """Of the whole prompt; for `agentic`, of the tokens that a step appends."""
    output_tokens: Percentiles
    rate_rps: float
    """Requests per second, as published; 0 where sessions decide."""
    cv_interarrival: float
    """Standard deviation of gaps between arrivals ÷ their mean."""
    make: Callable[[Preset], Iterator[Request]]


def build(preset: Preset) -> tuple[Request, ...]:
    """The requests of a preset, in order of arrival."""
    return tuple(sorted(preset.make(preset), key=lambda request: request.arrival_ms))


def value_at(percentiles: Percentiles, u: float) -> float:
    """The value at the quantile u in [0, 1); below the lowest percentile its value, above the highest its value."""
    points = list(percentiles.items())
    for (p0, v0), (p1, v1) in itertools.pairwise(points):
        if p0 <= 100 * u <= p1:
            share = (100 * u - p0) / (p1 - p0)
            return math.exp(math.log(v0) + share * (math.log(v1) - math.log(v0)))
    return points[0][1] if 100 * u < points[0][0] else points[-1][1]


def spread(index: int) -> tuple[float, float, float]:
    """Point `index` of the additive sequence of the generalised golden ratio in three dimensions (x⁴ = x + 1)."""
    root = 1.2207440846057596
    x, y, z = ((0.5 + index / root**power) % 1.0 for power in (1, 2, 3))
    return x, y, z


def weibull_gap(mean: float, cv: float, u: float) -> float:
    """The gap at quantile u of a Weibull distribution with this mean and coefficient of variation."""
    shape = _weibull_shape(cv)
    scale = mean / math.gamma(1 + 1 / shape)
    return float(scale * (-math.log1p(-u)) ** (1 / shape))


@functools.cache
def _weibull_shape(cv: float) -> float:
    low, high = 0.1, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        found = math.sqrt(math.gamma(1 + 2 / middle) / math.gamma(1 + 1 / middle) ** 2 - 1)
        low, high = (middle, high) if found > cv else (low, middle)
    return (low + high) / 2


def _independent(preset: Preset) -> Iterator[Request]:
    """Requests that share nothing."""
    arrival_ms = 0.0
    for index in range(NUM_REQUESTS):
        x, y, z = spread(index)
        yield Request(
            arrival_ms=round(arrival_ms, 1),
            input_tokens=round(value_at(preset.input_tokens, x)),
            output_tokens=round(value_at(preset.output_tokens, y)),
        )
        arrival_ms += weibull_gap(1000.0 / preset.rate_rps, preset.cv_interarrival, z)


_BLOCK_TOKENS = 512
_CONTINUES_SHARE = 0.387
"""Share of Mooncake's requests that find more than one block of theirs in the cache."""
_LOOK_BACK = 64


def _chained(preset: Preset) -> Iterator[Request]:
    """Requests that begin with one common block; a published share of them continues an earlier request's chain."""
    ids = iter(range(1, 10**9))
    chains: list[tuple[int, ...]] = []
    for index, plain in enumerate(_independent(preset)):
        full, rest = divmod(plain.input_tokens, _BLOCK_TOKENS)
        continues = math.floor((index + 1) * _CONTINUES_SHARE) > math.floor(index * _CONTINUES_SHARE)
        earlier = [chain for chain in chains[-_LOOK_BACK:] if len(chain) <= full] if continues else []
        prefix = max(earlier, key=len, default=(0,) if full else ())
        chain = prefix + tuple(next(ids) for _ in range(full - len(prefix)))
        chains.append(chain)
        yield Request(
            arrival_ms=plain.arrival_ms,
            input_tokens=plain.input_tokens,
            output_tokens=plain.output_tokens,
            prefix_hashes=chain + ((next(ids),) if rest else ()),
            block_tokens=_BLOCK_TOKENS,
        )


_STEPS_PER_SESSION: Percentiles = {25: 4, 50: 15, 90: 135, 99: 1107}
"""TraceLab, tool-initiated steps of a session."""
_GENERATION_SECONDS: Percentiles = {50: 4.9, 90: 20.2, 99: 78}
_TOOL_SECONDS: Percentiles = {50: 0.3, 90: 13.6, 99: 216}
_SHARED_TOKENS = 32_000
"""agentx layer1_tokens: instructions and tools, equal in all sessions."""
_SESSION_TOKENS = 15_000
"""agentx layer2 mean: what a session starts with."""
_CONTEXT_LIMIT = 200_000
"""agentx, the 200k-context data set: beyond it a session starts over from what it began with."""
_SESSION_GAP_SECONDS = 84
"""TraceLab, median gap before a person's next request: sessions start so far apart."""
_NUM_SESSIONS = 16


def _sessions(preset: Preset) -> Iterator[Request]:
    """Steps of coding sessions: each prompt is the one before it, its answer, and what a tool or a person appended."""
    ids = iter(range(_SHARED_TOKENS // _BLOCK_TOKENS, 10**9))
    shared = tuple(range(_SHARED_TOKENS // _BLOCK_TOKENS))
    made = 0
    for session in range(_NUM_SESSIONS):
        steps = round(value_at(_STEPS_PER_SESSION, spread(session)[0]))
        chain, context = shared, _SHARED_TOKENS + _SESSION_TOKENS
        arrival_ms = session * _SESSION_GAP_SECONDS * 1000.0
        for _ in range(min(steps, NUM_REQUESTS - made)):
            x, y, z = spread(made)
            append, output = round(value_at(preset.input_tokens, x)), round(value_at(preset.output_tokens, y))
            if context + append + output > _CONTEXT_LIMIT:
                chain, context = shared, _SHARED_TOKENS + _SESSION_TOKENS
            tokens = context + append
            full, rest = divmod(tokens, _BLOCK_TOKENS)
            chain = chain + tuple(next(ids) for _ in range(full - len(chain)))
            yield Request(
                arrival_ms=round(arrival_ms, 1),
                input_tokens=tokens,
                output_tokens=output,
                prefix_hashes=chain + ((next(ids),) if rest else ()),
                block_tokens=_BLOCK_TOKENS,
            )
            made += 1
            context = tokens + output
            arrival_ms += 1000 * (value_at(_GENERATION_SECONDS, y) + value_at(_TOOL_SECONDS, z))


def _around(median: float, sigma: float) -> Percentiles:
    """Percentiles of a log-normal distribution, from the standard normal's."""
    normal = {1: -2.326, 5: -1.645, 10: -1.282, 25: -0.674, 50: 0.0, 75: 0.674, 90: 1.282, 95: 1.645, 99: 2.326}
    return {percentile: median * math.exp(sigma * z) for percentile, z in normal.items()}


_ALL = (
    Preset(
        name="chat",
        note="lengths, rate and burstiness of Azure's 2023 conversation trace (19,366 requests; Splitwise, ISCA 2024)",
        input_tokens={
            1: 29,
            10: 207,
            25: 396,
            50: 1020,
            75: 1189,
            90: 2734.5,
            95: 4083,
            99: 4142,
            99.9: 6179,
            100: 14050,
        },
        output_tokens={1: 16, 10: 54, 25: 85, 50: 129, 75: 395, 90: 424, 95: 451, 99: 601, 99.9: 954, 100: 1000},
        rate_rps=5.5304,
        cv_interarrival=1.094,
        make=_independent,
    ),
    Preset(
        name="code",
        note="lengths, rate and burstiness of Azure's 2023 code-completion trace (8,819 requests; Splitwise, ISCA 2024)",
        input_tokens={1: 17, 10: 147, 25: 578, 50: 1469, 75: 2744.5, 90: 5187.6, 95: 7303.3, 99: 7436, 100: 7437},
        output_tokens={1: 6, 10: 7, 25: 9, 50: 13, 75: 24, 90: 55, 95: 90, 99: 251.5, 99.9: 825, 100: 1899},
        rate_rps=2.5667,
        cv_interarrival=13.151,
        make=_independent,
    ),
    Preset(
        name="agentic",
        note="coding-agent steps: medians of TraceLab (357,161 rounds, 2026), spread and session start of agentx-harness 1.0.12",
        input_tokens=_around(875, 0.9005),
        output_tokens=_around(214, 0.9005),
        rate_rps=0.0,
        cv_interarrival=0.0,
        make=_sessions,
    ),
    Preset(
        name="long-context",
        note="lengths and prefix sharing of Mooncake's conversation trace (12,031 requests; FAST 2025); burstiness at 10 s,"
        " since its clock ticks every 3 s",
        input_tokens={
            1: 894,
            10: 964,
            25: 2306.5,
            50: 6909,
            75: 15367,
            90: 27367,
            95: 39550.5,
            99: 85400,
            99.9: 121301,
            100: 126195,
        },
        output_tokens={1: 3, 10: 24, 25: 156.5, 50: 350, 75: 472, 90: 597, 95: 698, 99: 1118.5, 100: 2000},
        rate_rps=3.4015,
        cv_interarrival=math.sqrt(2.09),
        make=_chained,
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}
