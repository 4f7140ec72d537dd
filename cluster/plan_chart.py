"""The Pareto frontier of a planning answer as a picture: PNG, or a self-contained HTML page with the picture and the table."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

from hotpass.errors import InputError

if TYPE_CHECKING:
    from costmodel.records import PlanResult


def draw(result: PlanResult, path: Path) -> None:
    """Write `path`; its suffix says which kind. Raises InputError for another suffix."""
    if path.suffix not in (".png", ".html"):
        raise InputError("--plot", path, "is neither .png nor .html", "choose one of the two")
    picture = _picture(result)
    if path.suffix == ".png":
        path.write_bytes(picture)
    else:
        path.write_text(_page(result, picture), encoding="utf-8")


def _picture(result: PlanResult) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    users = [made.tokens_per_s_per_user.value for made in result.plans]
    each = [made.tokens_per_s_per_gpu.value for made in result.plans]
    axes.scatter(users, each, s=14, color="#9aa5b1", label="ranked plans")
    axes.plot(
        [point[1] for point in result.frontier], [point[2] for point in result.frontier], "o-", ms=4, color="#1f6feb",
        label="frontier",
    )  # fmt: skip
    if result.plans:
        best = result.plans[0]
        spread = best.tokens_per_s_per_gpu
        axes.errorbar(
            [best.tokens_per_s_per_user.value], [spread.value], yerr=[[spread.value - spread.low], [spread.high - spread.value]],
            fmt="D", color="#d1242f", capsize=3, label=f"best: {best.name} (90 %)",
        )  # fmt: skip
    axes.set(xlabel="tokens/s for each user", ylabel="output tokens/s for each GPU", xscale="log", ylim=(0, None))
    axes.set_title(f"{result.model} on {result.hardware}, predicted", loc="left")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=130)
    return held.getvalue()


def _page(result: PlanResult, picture: bytes) -> str:
    table = result.dataframe().head(50).to_html(index=False, float_format=lambda value: f"{value:.4g}", border=0)
    pruned = "".join(f"<li>{count} {html.escape(reason)}</li>" for reason, count in result.pruned.items())
    title = html.escape(f"{result.model} on {result.hardware}")
    return (
        f"<!doctype html><meta charset='utf-8'><title>{title}</title>"
        "<style>body{font:14px system-ui;margin:2em;max-width:80em}table{border-collapse:collapse;font-size:12px}"
        "td,th{padding:2px 8px;text-align:right}</style>"
        f"<h1>{title}</h1><p>Predicted from {html.escape(result.source)}; intervals of 90 %. {result.considered} plans priced.</p>"
        f"<img alt='Pareto frontier' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>"
        f"{table}<p>Left out:</p><ul>{pruned}</ul>"
    )
