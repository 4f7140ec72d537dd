"""Hardware for people: a named system with the source of each figure, this machine with what was measured on it.

Only `hotpass hardware` prints this. What the figures mean is in `hotpass.hardware.figures` and `docs/hardware.md`; rich is imported
when something is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hotpass.hardware.figures import FIGURES, SOURCES, System
from hotpass.records.deployment import HardwareRef

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

UNITS = {
    "tflop_per_s": "TFLOP/s", "gflop_per_s": "GFLOP/s", "top_per_s": "TOP/s", "tb_per_s": "TB/s", "gb_per_s": "GB/s",
    "gb": "GB", "mb": "MB", "watts": "W",
}  # fmt: skip
"""End of a figure's name → its unit."""
SPREADS = {"read_gb_per_s": "read_spread", "fp32_gflop_per_s": "fp32_spread", "bf16_gflop_per_s": "bf16_spread"}
"""Measured figure → the detail that has its spread."""
BUSY_SHARE = 0.9
"""Below it others ran beside the probe, and every figure is too low (`docs/hardware.md`)."""


def split_unit(name: str) -> tuple[str, str]:
    """`memory_tb_per_s` as its words and its unit, `("memory", "TB/s")`; no unit where the name has none."""
    for end, unit in UNITS.items():
        if name.endswith(f"_{end}"):
            return name.removesuffix(f"_{end}").replace("_", " "), unit
    return name.replace("_", " "), ""


def describe_system(system: System) -> Group:
    """Its figures with unit, how far sources agree, source, and what else is said; then the sources in full."""
    from rich.console import Group
    from rich.text import Text

    shown = _table("figure", "value", "sources", "source", "what it is")
    for name, figure in system.numbers.items():
        label, unit = split_unit(name)
        style = "yellow" if figure.agreement == "disputed" else ""
        what = FIGURES[name] + (f" ({figure.note})" if figure.note else "")
        shown.add_row(
            label, f"{figure.value:,g} {unit}".strip(), figure.agreement.value, figure.source, what, style=style
        )
    used = sorted({figure.source for figure in system.numbers.values()})
    aliases = f" · also {', '.join(system.aliases)}" if system.aliases else ""
    return Group(
        Text(f"{system.title} ({system.name}{aliases})", style="bold"),
        Text(
            "published figures of one accelerator, dense, one direction of a link; none was measured here", style="dim"
        ),
        shown,
        *(Text(f"{source}: {SOURCES[source]}", style="dim") for source in used),
    )


def describe_machine(hardware: HardwareRef) -> Group:
    """Facts, measured figures with their spread, and the curve of reads by working set."""
    from rich.console import Group
    from rich.text import Text

    details = hardware.details
    unit = "physical core" if hardware.device == "cpu" else "GPU"
    facts = [
        f"{hardware.num_devices} {unit}{'s' if hardware.num_devices != 1 else ''}",
        f"last-level cache {_bytes(hardware.last_level_cache_bytes)}",
        f"memory {_bytes(hardware.memory_bytes)}",
    ]
    parts = [Text(hardware.name, style="bold"), Text(" · ".join(facts))]
    if hardware.isa:
        parts.append(Text(f"instruction sets: {' '.join(hardware.isa)}"))
    share = details.get("cpu_share")
    if isinstance(share, int | float) and share < BUSY_SHARE:
        parts.append(
            Text(
                f"disturbed: the probe got {share:.0%} of its cores' time, so every figure is too low; run it again alone",
                style="yellow",
            )
        )
    tables = [table for table in (_figures(details), _curve(details)) if table.row_count]
    return Group(*parts, *tables)


def _figures(details: Mapping[str, str | int | float]) -> Table:
    """Everything but the curve; a spread stands beside its figure."""
    shown = _table("figure", "value", "spread")
    for name, value in details.items():
        if name in SPREADS.values() or _curve_mib(name) is not None:
            continue
        spread = details.get(SPREADS.get(name, ""))
        label, unit = split_unit(name.removesuffix("_bytes"))
        text = (
            _bytes(int(value)) if name.endswith("_bytes") else f"{value:,g} {unit}" if _is_number(value) else str(value)
        )
        shown.add_row(label, text.strip(), f"{spread:.0%}" if _is_number(spread) else "")
    return shown


def _curve(details: Mapping[str, str | int | float]) -> Table:
    shown = _table("reads of a working set of", "GB/s")
    for name, value in details.items():
        mib = _curve_mib(name)
        if mib is not None:
            shown.add_row(_bytes(mib * 2**20), f"{value:,g}")
    return shown


def _curve_mib(name: str) -> int | None:
    found = re.fullmatch(r"read_gb_per_s_at_(\d+)_mib", name)
    return int(found[1]) if found else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _bytes(count: int) -> str:
    """In binary units: `300 MiB`, `23.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(
            name, justify="right" if name in ("value", "spread", "GB/s") else "left", no_wrap=name != "what it is"
        )
    return table
