"""What people see: counts of what was left out, the shape table, pictures that open anywhere."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hotpass.errors import InputError
from hotpass.traffic import Format, Lengths, Request, Traffic, read_traffic, shape_table
from hotpass.traffic.records import make_traffic
from hotpass.traffic.render import cautions, describe, headline, plot


def shown(traffic: Traffic) -> str:
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(describe(traffic, shape_table(traffic, 4)))
    return console.export_text()


def test_description_of_a_preset() -> None:
    text = shown(read_traffic("chat", max_context=8192))
    assert "chat (preset): 999 requests" in text
    assert "not used: 1 request with 8,200 tokens" in text
    assert "beyond-context" in text
    assert "Splitwise" in text
    assert "index of dispersion" in text
    assert "at 60 s" not in text  # three windows of a minute say nothing of their variation
    assert "lengths only, filled with corpus text" in text
    assert "shape table: 4 clients, prefill chunks of 512 tokens" in text
    assert "decode" in text
    assert "mixed" in text


def test_prefix_hits_are_told() -> None:
    assert "36.8% of prompt tokens were seen before" in shown(read_traffic("long-context"))


def test_cautions_of_a_log_without_usage_and_clock() -> None:
    request = Request(arrival_ms=0, input_tokens=3, output_tokens=2, text="hello", lengths=Lengths.ESTIMATED)
    traffic = make_traffic("log", Format.OPENAI_LOG, (request,), has_clock=False, dropped={})
    assert cautions(traffic) == [
        "lengths: estimated from the size of the text for 1 request",
        "arrivals: the source has none",
    ]
    assert headline(traffic) == "log (openai-log): 1 request, 5 tokens"


def test_plots(tmp_path: Path) -> None:
    traffic = read_traffic("code", limit=200)
    table = shape_table(traffic, 4)
    png = plot(traffic, table, tmp_path / "new" / "t.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert plot(traffic, table, tmp_path / "again.png").read_bytes() == png
    page = plot(traffic, table, tmp_path / "t.html").read_text()
    assert "data:image/png;base64," in page
    assert "shape table" in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_plot_without_clock(tmp_path: Path) -> None:
    request = Request(arrival_ms=0, input_tokens=3, output_tokens=2, text="hello")
    traffic = make_traffic("log", Format.OPENAI_LOG, (request,) * 3, has_clock=False, dropped={})
    assert plot(traffic, shape_table(traffic, 1), tmp_path / "t.png").stat().st_size > 10_000


def test_other_suffixes_and_bad_places_are_refused(tmp_path: Path) -> None:
    traffic = read_traffic("chat", limit=5)
    table = shape_table(traffic, 1)
    with pytest.raises(InputError, match=r"end it with \.png or \.html"):
        plot(traffic, table, tmp_path / "t.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        plot(traffic, table, tmp_path / "file" / "t.png")


def test_nothing_heavy_is_imported_with_traffic() -> None:
    code = "import sys, hotpass.traffic, hotpass.traffic.render; print([m for m in ('rich', 'matplotlib', 'pandas', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3], check=True
    )
    assert done.stdout.strip() == "[]"
