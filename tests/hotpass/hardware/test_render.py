"""What people read of hardware: units, how far sources agree, spreads, and that a disturbed probe says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from hotpass.hardware import FIGURES, SYSTEMS, system
from hotpass.hardware.render import describe_machine, describe_system, split_unit
from hotpass.records.deployment import HardwareRef

MACHINE = HardwareRef(
    name="cpu:Test",
    device="cpu",
    num_devices=2,
    isa=("avx2", "fma"),
    last_level_cache_bytes=32 * 2**20,
    memory_bytes=24 * 2**30,
    details={
        "read_gb_per_s_at_1_mib": 250.5,
        "read_gb_per_s_at_1024_mib": 25.0,
        "read_spread": 0.04,
        "cpu_share": 0.99,
        "read_gb_per_s": 25.0,
        "effective_cache_bytes": 16 * 2**20,
    },
)


def lines_of(shown: RenderableType) -> list[str]:
    console = Console(width=200, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return [" ".join(line.split()) for line in captured.get().splitlines()]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("memory_tb_per_s", ("memory", "TB/s")),
        ("bf16_tflop_per_s", ("bf16", "TFLOP/s")),
        ("memory_gb", ("memory", "GB")),
        ("scale_up_domain", ("scale up domain", "")),
    ],
)
def test_units_come_from_names(name: str, said: tuple[str, str]) -> None:
    assert split_unit(name) == said


def test_every_published_figure_but_a_count_has_a_unit() -> None:
    assert [name for name in FIGURES if not split_unit(name)[1]] == ["scale_up_domain"]


def test_a_figure_stands_with_its_unit_agreement_source_and_note() -> None:
    lines = lines_of(describe_system(system("b200")))
    assert "memory 7.7 TB/s disputed aiconfigurator memory bandwidth (8.0 in marketing)" in lines
    assert "aiconfigurator: aiconfigurator-core 0.12.0 (PyPI, Apache-2.0), systems/*.yaml" in lines
    for known in SYSTEMS.values():
        assert len(lines_of(describe_system(known))) >= len(known.numbers)


def test_a_measured_figure_stands_with_its_spread_and_the_curve_by_size() -> None:
    lines = lines_of(describe_machine(MACHINE))
    assert "2 physical cores · last-level cache 32 MiB · memory 24 GiB" in lines
    assert "read 25 GB/s 4%" in lines
    assert "effective cache 16 MiB" in lines
    assert "1 GiB 25" in lines
    assert not [line for line in lines if "disturbed" in line or "_" in line]


def test_a_disturbed_probe_says_so() -> None:
    busy = replace(MACHINE, details={**MACHINE.details, "cpu_share": 0.5})
    assert "disturbed: the probe got 50% of its cores' time" in "\n".join(lines_of(describe_machine(busy)))
