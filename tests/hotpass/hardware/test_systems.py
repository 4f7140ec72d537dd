"""The table of systems: complete, sourced, found by any of its names."""

from __future__ import annotations

import pytest

from hotpass.errors import InputError
from hotpass.hardware import FIGURES, SOURCES, SYSTEMS, Agreement, match_gpu, system

NAMES = (
    "a100-80g", "b200", "b300", "cpu", "gb200-nvl72", "gb300-nvl72", "groq-lp30", "groq-lpu", "h100-sxm", "h200", "l40s", "mi300x",
    "trainium2", "vera-rubin-nvl72",
)  # fmt: skip


def test_names() -> None:
    assert tuple(sorted(SYSTEMS)) == NAMES


def test_every_figure_has_a_meaning_and_a_source() -> None:
    for known in SYSTEMS.values():
        for name, figure in known.numbers.items():
            assert name in FIGURES
            assert figure.source in SOURCES
            assert figure.value > 0


def test_no_name_means_two_systems() -> None:
    spellings = [spelling for known in SYSTEMS.values() for spelling in (known.name, *known.aliases)]
    assert len(spellings) == len(set(spellings))
    for known in SYSTEMS.values():
        assert all(system(spelling) is known for spelling in (known.name, *known.aliases))


@pytest.mark.parametrize(
    ("name", "figure", "value", "agreement"),
    [
        ("h100-sxm", "memory_tb_per_s", 3.35, Agreement.AGREED),
        ("h200", "memory_gb", 151.4, Agreement.AGREED),
        ("b200", "memory_tb_per_s", 7.7, Agreement.DISPUTED),
        ("gb300-nvl72", "fp4_tflop_per_s", 15000, Agreement.AGREED),
        ("vera-rubin-nvl72", "scale_up_gb_per_s", 1800, Agreement.AGREED),
        ("trainium2", "bf16_tflop_per_s", 667, Agreement.AGREED),
        ("groq-lpu", "memory_gb", 0.23, Agreement.AGREED),
    ],
)
def test_figures(name: str, figure: str, value: float, agreement: Agreement) -> None:
    found = SYSTEMS[name].numbers[figure]
    assert (found.value, found.agreement) == (value, agreement)


def test_disputed_figures_that_have_rivals_name_them() -> None:
    assert "8.0" in SYSTEMS["b200"].numbers["memory_tb_per_s"].note
    assert "50,000" in SYSTEMS["vera-rubin-nvl72"].numbers["fp4_tflop_per_s"].note


def test_a_figure_that_nobody_publishes_is_absent() -> None:
    assert "fp8_tflop_per_s" not in SYSTEMS["a100-80g"].numbers
    assert "power_watts" not in SYSTEMS["groq-lp30"].numbers


def test_lookup_forgives_spelling_and_refuses_with_the_nearest() -> None:
    assert system("H100_SXM").name == "h100-sxm"
    assert system(" Vera Rubin ").name == "vera-rubin-nvl72"
    with pytest.raises(InputError, match="hardware 'h20' is not a known system; did you mean 'h200'"):
        system("h20")


def test_ref_carries_published_figures_in_the_probes_units() -> None:
    ref = system("h100").ref(num_devices=8)
    assert (ref.name, ref.device, ref.num_devices) == ("h100-sxm", "cuda", 8)
    assert ref.memory_bytes == 85_900_000_000
    assert ref.last_level_cache_bytes == 50_000_000
    assert ref.details["read_gb_per_s"] == pytest.approx(3350)
    assert ref.details["bf16_gflop_per_s"] == 989_000
    assert ref.details["provenance"] == "published"
    assert ref.id != system("h200").ref(num_devices=8).id


def test_the_cpu_is_measured_not_published() -> None:
    with pytest.raises(InputError, match="this machine is measured"):
        system("cpu").ref()


@pytest.mark.parametrize(
    ("nvml_name", "memory_gib", "expected"),
    [
        ("NVIDIA H200", 140.4, "h200"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", 80.0, "a100-80g"),
        ("NVIDIA GB200", 185.0, "gb200-nvl72"),
        ("NVIDIA B200", 179.1, "b200"),
        ("NVIDIA H100 NVL", 93.6, None),
        ("NVIDIA A100-SXM4-40GB", 40.0, None),
        ("NVIDIA GeForce RTX 4090", 24.0, None),
        ("NVIDIA H200", 17.5, None),
    ],
)
def test_matching_what_nvml_says(nvml_name: str, memory_gib: float, expected: str | None) -> None:
    assert match_gpu(nvml_name, int(memory_gib * 2**30)) == expected
