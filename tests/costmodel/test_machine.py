"""Machines from the table, and this one from its probe."""

from __future__ import annotations

import pytest

from costmodel.machine import Machine
from hotpass.errors import InputError
from hotpass.records.deployment import HardwareRef


def probed(**details: float) -> HardwareRef:
    return HardwareRef(
        name="cpu",
        device="cpu",
        num_devices=2,
        isa=(),
        last_level_cache_bytes=1 << 25,
        memory_bytes=1 << 33,
        details=details,
    )


def test_a_cpu_without_units_for_bf16_computes_it_at_its_fp32_rate() -> None:
    machine = Machine.of(probed(read_gb_per_s=20.0, fp32_gflop_per_s=140.0, bf16_gflop_per_s=1.0))
    assert machine.peak("bf16") == machine.peak("fp32") == 140e9


def test_a_cpu_with_units_for_bf16_has_a_rate_of_each() -> None:
    machine = Machine.of(probed(read_gb_per_s=20.0, fp32_gflop_per_s=140.0, bf16_gflop_per_s=900.0))
    assert (machine.peak("fp32"), machine.peak("bf16")) == (140e9, 900e9)


def test_a_probe_without_rates_is_no_machine() -> None:
    with pytest.raises(InputError, match="was probed without bandwidth or FLOP rate"):
        Machine.of(probed(read_gb_per_s=20.0))
