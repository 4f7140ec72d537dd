"""What LLM calls cost, counted per class of token and in money, and when that is enough. No clock and no LLM here.

A call whose price nobody knows counts no money, and is counted as such; the token cap holds for all calls alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmCall:
    """One request to an LLM and what came of it: a `reply` event of the ledger."""

    author: str
    """`agent:<brief>`."""
    model: str
    """As litellm names it."""
    outcome: str
    """`reply`, or why there was none: `timeout`, `rate-limited`, `server-error`, `refused`, `overlong`, …"""
    seconds: float
    """From the request to the end of the reply, as the agent's clock has it."""
    prompt_tokens: int = 0
    """Tokens read, those from the provider's cache among them."""
    cached_tokens: int = 0
    """Of the prompt tokens, those that the provider had in its cache."""
    completion_tokens: int = 0
    """Tokens written, hidden reasoning among them."""
    reasoning_tokens: int = 0
    """Of the completion tokens, those that were never shown."""
    usd: float | None = None
    """None when the price of the model is unknown."""
    estimated: bool = False
    """True when the provider gave no usage and tokens were counted here."""
    exchange: str = ""
    """Hash of what was said and answered (`search.agents.exchange`); empty where there was no reply."""

    @property
    def tokens(self) -> int:
        """All that count against a token cap."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmCaps:
    """Limits of one campaign over all its agents; 0 means no such limit."""

    tokens: int = 0
    usd: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmSpend:
    """Sums over calls."""

    calls: int = 0
    replies: int = 0
    """Calls with outcome `reply`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    usd: float = 0.0
    """Of the calls whose price is known."""
    unpriced_tokens: int = 0
    """Tokens of calls whose price is unknown; money says nothing about them."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def plus(self, call: LlmCall) -> LlmSpend:
        return LlmSpend(
            calls=self.calls + 1,
            replies=self.replies + (call.outcome == "reply"),
            prompt_tokens=self.prompt_tokens + call.prompt_tokens,
            cached_tokens=self.cached_tokens + call.cached_tokens,
            completion_tokens=self.completion_tokens + call.completion_tokens,
            reasoning_tokens=self.reasoning_tokens + call.reasoning_tokens,
            usd=self.usd + (call.usd or 0.0),
            unpriced_tokens=self.unpriced_tokens + (call.tokens if call.usd is None else 0),
        )


def total(calls: Iterable[LlmCall]) -> LlmSpend:
    spend = LlmSpend()
    for call in calls:
        spend = spend.plus(call)
    return spend


def by_author(calls: Iterable[LlmCall]) -> dict[str, LlmSpend]:
    """Sums per author, by name."""
    found: dict[str, LlmSpend] = {}
    for call in calls:
        found[call.author] = found.get(call.author, LlmSpend()).plus(call)
    return dict(sorted(found.items()))


def outcomes(calls: Iterable[LlmCall]) -> Counter[str]:
    return Counter(call.outcome for call in calls)


def reason_to_stop_asking(caps: LlmCaps, spend: LlmSpend) -> str:
    """Empty while agents may ask their LLM, else the cap that is reached, in words."""
    if caps.tokens and spend.tokens >= caps.tokens:
        return f"{spend.tokens:,} of {caps.tokens:,} LLM tokens are spent"
    if caps.usd and spend.usd >= caps.usd:
        return f"{spend.usd:.2f} of {caps.usd:.2f} USD are spent"
    return ""
