"""Plans: which exist, what they hold in memory, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from costmodel.graph import ModelGraph
from costmodel.machine import Machine, parse_machine
from costmodel.operators import Layout
from costmodel.plans import enumerate_layouts, memory_of, with_formats
from hotpass.errors import InputError


def labels(layout: Layout) -> set[str]:
    return {layout.label(index) for index in range(len(layout))}


def test_dense_plans_are_tensor_and_pipeline(dense: ModelGraph, machine: Machine) -> None:
    layout, pruned = enumerate_layouts(dense, machine)
    found = labels(layout)
    assert {"tp1", "tp8", "tp8 pp2", "tp1 pp8"} <= found
    assert not [name for name in found if "dp" in name or "ep" in name]
    assert (layout.gpus <= 16).all()
    assert (layout.tp <= 8).all()  # two unlabelled nodes of eight are not one domain of 16
    assert pruned["more accelerators than there are"] > 0


def test_a_large_domain_is_one_domain(routed: ModelGraph) -> None:
    layout, _ = enumerate_layouts(routed, parse_machine("gb200-nvl72"))
    assert "dp64 ep64 a2a" in {label.removeprefix("tp1 ") for label in labels(layout)}
    small, _ = enumerate_layouts(routed, parse_machine("4*h100x8"))
    assert (small.tp * small.dp).max() == 8


def test_context_parallelism_needs_copies(dense: ModelGraph, machine: Machine) -> None:
    layout, _ = enumerate_layouts(dense, machine)
    assert (layout.dcp == 1).all()  # 8 key-value heads over at most 8 ranks: nothing is copied


def test_memory_by_hand(dense: ModelGraph) -> None:
    memory = memory_of(
        dense,
        Layout.of(tp=4, pp=2),
        concurrency=np.array([16.0]),
        context=2048,
        kv_bytes=2.0,
        chunk_tokens=0,
        reserved_bytes=1e9,
    )
    ends = 2 * 128256 * 4096 * 2
    assert memory.weights[0] == pytest.approx((dense.weight_bytes() - ends) / 8 + ends / 4)
    assert memory.cache[0] == pytest.approx(16 * dense.kv_bytes(2048) / 8)
    assert memory.working[0] == pytest.approx(1e9 + 4 * 16 * 128256 / 4)


def test_experts_are_divided_by_their_own_ranks(routed: ModelGraph) -> None:
    whole = memory_of(
        routed, Layout.of(), concurrency=np.array([1.0]), context=1, kv_bytes=2.0, chunk_tokens=0, reserved_bytes=1e9
    )
    spread = memory_of(
        routed,
        Layout.of(dp=8, ep=8),
        concurrency=np.array([1.0]),
        context=1,
        kv_bytes=2.0,
        chunk_tokens=0,
        reserved_bytes=1e9,
    )
    experts = 32 * 64 * 3 * 4096 * 1024 * 2
    assert whole.weights[0] - spread.weights[0] == pytest.approx(experts * 7 / 8)


def test_little_memory_is_not_all_reserved() -> None:
    assert parse_machine("h100-sxm").reserved_bytes == 3.5e9
    assert parse_machine("groq-lpu").reserved_bytes == pytest.approx(0.05 * 0.23e9)


def test_precision_changes_what_checkpoints_change(dense: ModelGraph, routed: ModelGraph) -> None:
    assert with_formats(dense, None) is dense
    assert {m.format for _, layer in with_formats(dense, "fp8").layers for m in layer.matrices} == {"fp8"}
    kept = {
        m.role.value for _, layer in with_formats(routed, "nvfp4").layers for m in layer.matrices if m.format == "bf16"
    }
    assert kept == {"qkv", "attention_out", "router"}
    with pytest.raises(InputError, match="did you mean 'nvfp4'"):
        with_formats(dense, "nvp4")


@pytest.mark.parametrize(
    ("text", "devices", "domain"),
    [("h200", 8, 8), ("h200x4", 4, 4), ("4*h100x8", 32, 8), ("gb300-nvl72", 72, 72), ("l40s", 1, 1)],
)
def test_hardware_names_and_counts(text: str, devices: int, domain: int) -> None:
    machine = parse_machine(text)
    assert (machine.num_devices, machine.domain) == (devices, domain)


def test_disputed_figures_are_named() -> None:
    assert "memory_tb_per_s" in parse_machine("b200").disputed
    assert parse_machine("h100-sxm").disputed == ()


def test_a_yaml_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "memory_gb: 80\nmemory_tb_per_s: 2\nbf16_tflop_per_s: 300\nscale_up_gb_per_s: 100\nscale_up_domain: 4\n"
    )
    machine = parse_machine(str(path))
    assert (machine.name, machine.num_devices, machine.flops["bf16"]) == ("mine", 4, 3e14)
    path.write_text("memory_gb: -80\nmemory_tb_per_s: 2\n")
    with pytest.raises(InputError, match=r"memory_gb.*not a positive number"):
        parse_machine(str(path))
    path.write_text("memory_gb: [")
    with pytest.raises(InputError, match="cannot be read"):
        parse_machine(str(path))


@pytest.mark.parametrize(
    ("text", "says"), [("h2000", "did you mean 'h200'"), ("h200x0", "no accelerators"), ("cpu", "no published")]
)
def test_unusable_hardware_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_machine(text)
