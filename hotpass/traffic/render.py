"""Traffic for people: a summary for the terminal (rich), and a picture as PNG or self-contained HTML (matplotlib).

Both libraries are imported when something is drawn, never before. Computes nothing that `summary` and `shapes` do not.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotpass.errors import InputError
from hotpass.records.shapes import ShapeTable
from hotpass.traffic.records import Lengths, Traffic
from hotpass.traffic.summary import WINDOWS_SECONDS, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group
    from rich.table import Table

PLOT_SUFFIXES = (".png", ".html")
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
COLOURS = {"input": "#2f6f9f", "output": "#c8702a", "prefill": "#2f6f9f", "decode": "#c8702a", "mixed": "#7a5ea8"}


def describe(traffic: Traffic, table: ShapeTable) -> Group:
    """What the traffic is, what was left out of it, its lengths and arrivals, and its shape table."""
    from rich.console import Group
    from rich.text import Text

    summary = summarize(traffic)
    parts: list[Any] = [Text(headline(traffic), style="bold")]
    if traffic.note:
        parts.append(Text(traffic.note, style="dim"))
    parts += [Text(line, style="yellow") for line in cautions(traffic)]
    parts += ["", _lengths_table(summary)]
    parts += [Text(line) for line in (_arrival_line(summary), _cache_line(summary)) if line]
    parts += ["", _shapes_table(table), Text(_totals_line(table))]
    return Group(*parts)


def headline(traffic: Traffic) -> str:
    """Name, format, and how much is used."""
    ref = traffic.ref
    return f"{ref.name} ({ref.source_format}): {_requests(ref.num_requests)}, {traffic.tokens:,} tokens"


def cautions(traffic: Traffic) -> list[str]:
    """What a reader must know before trusting numbers made with this traffic, a sentence each."""
    lines = [
        f"not used: {_requests(count.requests)} with {count.tokens:,} tokens, {reason}"
        for reason, count in traffic.dropped.items()
    ]
    if not traffic.ref.content_valid:
        lines.append("content: lengths only, filled with corpus text; not valid for what depends on content")
    estimated = sum(request.lengths is Lengths.ESTIMATED for request in traffic.requests)
    if estimated:
        lines.append(f"lengths: estimated from the size of the text for {_requests(estimated)}")
    if not traffic.has_clock:
        lines.append("arrivals: the source has none")
    return lines


def _requests(count: int) -> str:
    return f"{count:,} request{'' if count == 1 else 's'}"


def _clients(table: ShapeTable) -> str:
    return f"{table.concurrency} client{'' if table.concurrency == 1 else 's'}"


def plot(traffic: Traffic, table: ShapeTable, path: str | Path) -> Path:
    """A picture of lengths, arrivals and the shape table, written as PNG or HTML by the suffix. Raises InputError."""
    path = Path(path)
    if path.suffix not in PLOT_SUFFIXES:
        raise InputError(
            "plot file", path, "is neither a picture nor a page", f"end it with {' or '.join(PLOT_SUFFIXES)}"
        )
    png = _png(_figure(traffic, table))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png if path.suffix == ".png" else _page(traffic, table, png).encode())
    except OSError as error:
        raise InputError("plot file", path, f"cannot be written ({error.strerror})", "choose another place") from None
    return path


def _lengths_table(summary: Mapping[str, Any]) -> Table:
    from rich.table import Table

    columns = ("mean", "p1", "p10", "p50", "p90", "p99", "max")
    table = Table(title="tokens a request", title_justify="left")
    for name in ("", *columns):
        table.add_column(name, justify="left" if not name else "right")
    for field in ("input", "output"):
        table.add_row(field, *(f"{summary[field][column]:,.0f}" for column in columns))
    return table


def _arrival_line(summary: Mapping[str, Any]) -> str:
    if "arrival" not in summary:
        return ""
    arrival = summary["arrival"]
    # Fewer windows than ten say nothing of how counts vary between windows.
    windows = [seconds for seconds in WINDOWS_SECONDS if arrival["span_s"] >= 10 * seconds]
    dispersion = ", ".join(f"{arrival[f'idx_disp_{seconds}s']:.1f} at {seconds} s" for seconds in windows)
    line = (
        f"arrivals: {arrival['rate_rps']:.2f} requests/s over {arrival['span_s']:,.0f} s, "
        f"gaps vary by {arrival['cv_interarrival']:.2f} times their mean"
    )
    return f"{line}, index of dispersion {dispersion}" if windows else line


def _cache_line(summary: Mapping[str, Any]) -> str:
    if "cache" not in summary:
        return ""
    hits = ", ".join(
        f"{hit:.1%} in {size} M tokens"
        for size, hit in summary["lru_token_hit_by_capacity_Mtok"].items()
        if size != "inf"
    )
    return f"prefixes: {summary['cache']['ideal_prefix_hit_tokens']:.1%} of prompt tokens were seen before; by cache size (LRU): {hits}"


def _shapes_table(table: ShapeTable) -> Table:
    from rich.table import Table

    shown = Table(
        title=f"shape table: {_clients(table)}, prefill chunks of {table.chunk_tokens} tokens",
        title_justify="left",
    )
    shown.add_column("phase")
    for name in ("sequences", "query tokens", "context mean", "context max", "steps", "output tokens"):
        shown.add_column(name, justify="right")
    for row in table.rows:
        shown.add_row(
            row.phase.value,
            f"{row.num_seqs}",
            f"{row.query_tokens}",
            f"{row.context_mean:,}",
            f"{row.context_max:,}",
            f"{row.steps_share:.1%}",
            f"{row.tokens_share:.1%}",
        )
    return shown


def _totals_line(table: ShapeTable) -> str:
    return f"{table.num_steps:,} steps counted, {table.output_tokens_per_step:.2f} output tokens a step"


def _figure(traffic: Traffic, table: ShapeTable) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.suptitle(headline(traffic), fontsize=11)
    _draw_lengths(axes[0][0], "input", [request.input_tokens for request in traffic.requests])
    _draw_lengths(axes[0][1], "output", [request.output_tokens for request in traffic.requests])
    _draw_arrivals(axes[1][0], traffic)
    _draw_shapes(axes[1][1], table)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_lengths(ax: Axes, name: str, tokens: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter

    edges = np.geomspace(max(1, min(tokens)), max(tokens) + 1, 41)
    ax.hist(tokens, bins=list(edges), color=COLOURS[name])
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    median = float(np.median(tokens))
    ax.axvline(median, color="black", linewidth=0.8)
    ax.annotate(
        f" median {median:,.0f}",
        (median, 0.97),
        xycoords=("data", "axes fraction"),
        va="top",
        fontsize=8,
        bbox=LABEL_BOX,
    )
    ax.set(title=f"{name} length", xlabel=f"{name} tokens (logarithmic)", ylabel="requests")


def _draw_arrivals(ax: Axes, traffic: Traffic) -> None:
    seconds = np.array([request.arrival_ms for request in traffic.requests]) / 1000.0
    if not traffic.has_clock or seconds[-1] <= 0:
        ax.text(0.5, 0.5, "the source has no arrival times", ha="center", va="center", transform=ax.transAxes)
        ax.set(title="arrivals", xticks=[], yticks=[])
        return
    width = max(1.0, float(np.ceil(seconds[-1] / 120)))
    counts = np.bincount((seconds // width).astype(np.int64))
    counts = counts[: max(1, int(seconds[-1] // width))]  # a window that the trace only begins would look quiet
    ax.stairs(counts / width, np.arange(len(counts) + 1) * width, fill=True, color=COLOURS["input"])
    ax.axhline(len(seconds) / seconds[-1], color="black", linewidth=0.8)
    ax.set(
        title=f"arrivals, in windows of {width:.0f} s (line: mean)",
        xlabel="seconds",
        ylabel="requests/s",
        ylim=(0, None),
    )


def _draw_shapes(ax: Axes, table: ShapeTable) -> None:
    rows = table.rows[::-1]
    places = np.arange(len(rows))
    largest = max(max(row.steps_share, row.tokens_share) for row in rows)
    for offset, share in ((0.2, "steps_share"), (-0.2, "tokens_share")):
        values = [getattr(row, share) for row in rows]
        colours = [COLOURS[row.phase.value] for row in rows]
        ax.barh(places + offset, values, height=0.36, color=colours, alpha=1.0 if share == "steps_share" else 0.45)
        for place, value in zip(places, values, strict=True):
            ax.text(value, place + offset, f" {value:.1%}", va="center", fontsize=7)
    labels = [
        f"{row.phase}, {row.num_seqs} seqs\n{row.query_tokens} tokens, context {row.context_mean:,}" for row in rows
    ]
    ax.set_yticks(places, labels, fontsize=7)
    ax.set(
        title=f"shape table, {_clients(table)}",
        xlabel="share of steps (full) and of output tokens (pale)",
        xlim=(0, 1.15 * largest),
    )


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    # No version and no date inside: the same traffic gives the same bytes.
    figure.savefig(data, format="png", dpi=110, metadata={"Software": None})
    return data.getvalue()


def _page(traffic: Traffic, table: ShapeTable, png: bytes) -> str:
    """One file: the description as text above the picture."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=120)
    console.print(describe(traffic, table))
    text = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    image = base64.b64encode(png).decode()
    title = html.escape(headline(traffic))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{font-family:sans-serif;margin:2rem;max-width:75rem}pre{line-height:1.25}img{max-width:100%}</style></head>\n"
        f'<body>{text}\n<img alt="{title}" src="data:image/png;base64,{image}"></body></html>\n'
    )
