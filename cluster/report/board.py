"""The message board and what LLMs cost, as sections of the report. What proposers wrote is escaped and shown as data."""

from __future__ import annotations

from html import escape

from cluster import telling
from cluster.live import clock_text
from cluster.report.data import ReportData
from search.agents.spend import LlmSpend

SHOWN_POSTS = 100
SCRIPTED = "/scripted"
"""End of the model name under which the shipped double is asked (`search.agents.scripted`)."""


def board_section(data: ReportData) -> str:
    """Empty where nobody posted."""
    state = data.state
    if not state.posts:
        return ""
    rows = []
    for row in state.posts[-SHOWN_POSTS:]:
        shown = telling.post(state, row)
        evidence = [
            f"{escape(item['candidate'])} {escape(item['verdict'])}"
            + (f" {item['speedup_over_loaded']['value']:.2f}×" if item["speedup_over_loaded"] else "")
            for item in shown["evidence"]
        ]
        cells = [
            clock_text(row.elapsed_seconds),
            escape(shown["author"]),
            escape(shown["kind"]),
            f"<pre>{escape(shown['text'])}</pre>",
            escape(", ".join(shown["candidates"])),
            "<br>".join(evidence),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(
        f"<th>{name}</th>" for name in ("time", "author", "kind", "text", "about", "evidence, by the ledger")
    )
    more = f" The last {SHOWN_POSTS} of {len(state.posts)}." if len(state.posts) > SHOWN_POSTS else ""
    return (
        "<h2>Message board</h2><p class=lead>What proposers and people told each other. Nothing was decided by these texts; "
        f"verdicts are the ledger's.{more}</p><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def llm_section(data: ReportData) -> str:
    """Empty where no LLM was asked."""
    spends = data.state.llm_spend
    if not spends:
        return ""
    names = ("agent", "calls", "replies", "tokens read", "of them cached", "tokens written", "of them hidden", "USD")
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (author, *_cells(spend))) + "</tr>"
        for author, spend in sorted(spends.items())
    )
    double = (
        " The LLM was a script: that shows that the plumbing works, and says nothing about the worth of agents."
        if data.plan.spec.llm.endswith(SCRIPTED)
        else ""
    )
    ended = ", ".join(f"{name} {count}" for name, count in data.state.llm_outcomes.most_common())
    return (
        f"<h2>What the LLM cost</h2><p class=lead>Model {escape(data.plan.spec.llm)}. How calls ended: {escape(ended)}.{double}</p><table><thead><tr>"
        + "".join(f"<th>{name}</th>" for name in names)
        + f"</tr></thead><tbody>{rows}</tbody></table>"
    )


def _cells(spend: LlmSpend) -> list[str]:
    unpriced = f" + {spend.unpriced_tokens:,} tokens of unknown price" if spend.unpriced_tokens else ""
    counts = (
        spend.calls, spend.replies, spend.prompt_tokens, spend.cached_tokens, spend.completion_tokens, spend.reasoning_tokens,
    )  # fmt: skip
    return [*(f"{count:,}" for count in counts), f"{spend.usd:.2f}{unpriced}"]
