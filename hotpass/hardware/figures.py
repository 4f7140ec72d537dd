"""Published figures of accelerators, as records: one accelerator, dense (no structured sparsity), one direction of a link.

Every figure has a source and says how far sources agree; a figure that nobody publishes is absent, never 0. Measured machines
reach a part of these: published matrix products reach 0.5 to 0.8 of the peak and weight streaming 0.7 to 0.9 (medians to maxima of
the kernel tables in aiconfigurator-core 0.12.0). Collected on 2026-11-30.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hotpass.errors import InputError
from hotpass.records.deployment import HardwareRef


class Agreement(StrEnum):
    """How far sources agree about a figure."""

    AGREED = "agreed"
    """Two independent sources say the same."""
    SINGLE = "single"
    """One source."""
    DISPUTED = "disputed"
    """Sources differ, or the figure is preliminary: look it up before a decision rests on it."""


SOURCES: Mapping[str, str] = {
    "aiconfigurator": "aiconfigurator-core 0.12.0 (PyPI, Apache-2.0), systems/*.yaml",
    "lockwood": "glennklockwood.com/garden/processors",
    "chips": "chipsandcheese.com, on B200",
    "neuron": "AWS Neuron documentation, Trainium2",
    "mi300x": "secondary pages on MI300X (servethehome.com, aiwiki.ai, jaredwatkins.com)",
    "rubin": "press on Vera Rubin (megaobzor.com, hyper.ai, silicontales.com)",
    "groq": "pages on Groq (awesomeagents.ai, voice.lapaas.com, aiwiki.ai)",
    "fibermall": "fibermall.com, HGX B300 table",
    "datasheet": "the vendor's data sheet as generally quoted, not looked up again",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number."""

    value: float
    """Unit: in the figure's name."""
    agreement: Agreement
    source: str
    """Key of `SOURCES`."""
    note: str = ""
    """What other sources say, where they differ."""


FIGURES: Mapping[str, str] = {
    "memory_gb": "usable memory, 1e9 bytes",
    "memory_tb_per_s": "memory bandwidth",
    "bf16_tflop_per_s": "dense; FP16 where there is no bf16",
    "fp8_tflop_per_s": "dense",
    "fp4_tflop_per_s": "dense",
    "int8_top_per_s": "dense, where it stands in for FP8",
    "last_level_cache_mb": "1e6 bytes",
    "scale_up_gb_per_s": "one accelerator to its scale-up domain, one direction",
    "scale_up_domain": "accelerators in one scale-up domain",
    "scale_out_gb_per_s": "one accelerator to other nodes, one direction",
    "host_gb_per_s": "one accelerator to its host, one direction",
    "power_watts": "thermal design power",
}
"""Names of figures, and what they mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A named system: one accelerator of a kind, and the domain it is sold in."""

    name: str
    title: str
    """For people."""
    device: str
    """What torch calls it: `cuda`, `cpu`, or the vendor's own name where hotpass has no engine for it."""
    aliases: tuple[str, ...] = ()
    gpu_names: tuple[str, ...] = ()
    """Regular expressions over NVML's name of the GPU."""
    numbers: Mapping[str, Figure] = field(default_factory=dict)
    """Figure name (`FIGURES`) → figure; empty for the CPU, which is measured."""

    def figures(self) -> dict[str, float]:
        """Names and values alone."""
        return {name: figure.value for name, figure in self.numbers.items()}

    def ref(self, num_devices: int = 1) -> HardwareRef:
        """The system as hardware of a deployment; its details are published figures, and say so. Raises InputError for the CPU."""
        if not self.numbers:
            raise InputError(
                "hardware", self.name, "has no published figures", "leave it out, and this machine is measured"
            )
        values = self.figures()
        return HardwareRef(
            name=self.name,
            device=self.device,
            num_devices=num_devices,
            isa=(),
            last_level_cache_bytes=int(values.get("last_level_cache_mb", 0.0) * 1e6),
            memory_bytes=int(values["memory_gb"] * 1e9),
            details={
                "provenance": "published",
                "read_gb_per_s": values["memory_tb_per_s"] * 1e3,
                **({"bf16_gflop_per_s": values["bf16_tflop_per_s"] * 1e3} if "bf16_tflop_per_s" in values else {}),
                **values,
            },
        )
