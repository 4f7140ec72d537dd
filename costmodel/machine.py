"""Hardware as the cost model sees it: one accelerator's rates, its scale-up domain, and how many there are.

Named systems come from `hotpass.hardware` with their published figures; a YAML file gives one's own; this machine is probed by the
caller (`Machine.of`). A count is part of the name: `h200x8` is one node of eight, `4*h100x8` four of them. Nodes without a label
never form one domain, whatever their number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hotpass.errors import InputError
from hotpass.hardware import Agreement, system
from hotpass.records.deployment import HardwareRef

TABLE_NAMES: Mapping[str, str] = {
    "a100-80g": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
    "l40s": "l40s",
}
"""Named system → folder of its kernel tables in aiconfigurator-core."""

FIGURES_NEEDED = ("memory_gb", "memory_tb_per_s", "scale_up_gb_per_s", "scale_up_domain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One accelerator and how it is joined to others; rates are peaks."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: Mapping[str, float]
    """`bf16`, `fp8`, `fp4` → dense FLOP/s; a format that the accelerator lacks is absent."""
    scale_up_bytes_per_s: float
    """One accelerator to its domain, one direction."""
    domain: int
    """Accelerators in one scale-up domain."""
    scale_out_bytes_per_s: float
    """One accelerator to other domains; 0 where there is no figure, and then no plan crosses domains."""
    num_devices: int
    """Accelerators at hand."""
    tables: str | None = None
    """Folder of measured kernel tables; None: roofline only."""
    disputed: tuple[str, ...] = ()
    """Figures that sources disagree about; they widen intervals."""

    @property
    def reserved_bytes(self) -> float:
        """For the runtime, graphs and collectives: 3.5 GB of a GPU (aiconfigurator-core 0.12.0, systems/*.yaml: `other_mem`), and of
        an accelerator with little memory not more than a twentieth."""
        return min(3.5e9, 0.05 * self.memory_bytes)

    def peak(self, fmt: str) -> float:
        """FLOP/s of matrix products with weights of that format: weights narrower than the units compute in the next wider type."""
        four_bit: tuple[str, ...] = ("fp8", "bf16") if "fp4" in self.flops else ("bf16",)
        order: dict[str, tuple[str, ...]] = {
            "fp8": ("fp8", "bf16"),
            "fp8_block": ("fp8", "bf16"),
            "nvfp4": ("fp4", "bf16"),
            "mxfp4": four_bit,
            "fp4": four_bit,
            "fp32": ("fp32", "bf16"),
        }
        for name in order.get(fmt, ("bf16",)):
            if name in self.flops:
                return self.flops[name]
        raise InputError("hardware", self.name, f"has no rate for {fmt} matrix products", "choose another precision")

    @staticmethod
    def of(ref: HardwareRef) -> Machine:
        """A probed machine: its measured bandwidth and FLOP rate. A CPU is one accelerator, however many cores it has."""
        devices = 1 if ref.device == "cpu" else ref.num_devices
        read = ref.details.get("read_gb_per_s")
        rates = {name: ref.details.get(f"{name}_gflop_per_s") for name in ("fp32", "bf16")}
        flops = {name: rate * 1e9 for name, rate in rates.items() if isinstance(rate, (int, float)) and rate > 0}
        if not isinstance(read, (int, float)) or not flops:
            raise InputError(
                "hardware",
                ref.name,
                "was probed without bandwidth or FLOP rate",
                "run `hotpass hardware` on an idle machine",
            )
        return Machine(
            name=ref.name,
            memory_bytes=float(ref.memory_bytes),
            memory_bytes_per_s=read * 1e9,
            flops={**flops, "bf16": max(flops.values())},  # without units of its own bf16 computes in fp32
            scale_up_bytes_per_s=read * 1e9,
            domain=devices,
            scale_out_bytes_per_s=0.0,
            num_devices=devices,
        )


def parse_machine(text: str, num_devices: int | None = None) -> Machine:
    """`h200`, `h200x8`, `4*h100x8`, or a YAML file. Raises InputError for unknown names, impossible counts and torn files.

    Without a count there is one scale-up domain."""
    if text.endswith((".yaml", ".yml")):
        machine = _from_yaml(Path(text))
    else:
        found = re.fullmatch(r"(?:(\d+)\s*\*\s*)?(.+?)(?:x(\d+))?", text.strip())
        assert found is not None
        name, per_node = found[2], found[3]
        try:
            machine = named_machine(name)
        except InputError:
            # A name may itself end in x and digits (an own spelling): only then is the count part of it.
            machine = named_machine(text.strip())
            per_node = None
        if per_node is not None:
            nodes = int(found[1] or 1)
            if nodes < 1 or int(per_node) < 1:
                raise InputError("hardware", text, "has no accelerators", "give a count of at least 1, as h200x8")
            machine = replace(
                machine, domain=min(machine.domain, int(per_node)), num_devices=nodes * int(per_node)
            )  # fmt: skip
        elif found[1]:
            machine = replace(machine, num_devices=int(found[1]) * machine.domain)
    if num_devices is not None:
        if num_devices < 1:
            raise InputError("--gpus", num_devices, "is not a number of accelerators", "give at least 1")
        machine = replace(machine, num_devices=num_devices)
    return machine


def named_machine(name: str) -> Machine:
    """A system of the table. Raises InputError with the nearest name, or the figure that it lacks."""
    found = system(name)
    values = found.figures()
    for figure in FIGURES_NEEDED:
        if figure not in values:
            raise InputError(
                "hardware", name, f"has no published figure for {figure}", "give a YAML file with figures of your own"
            )
    flops = {
        kind: values[f"{kind}_tflop_per_s"] * 1e12 for kind in ("bf16", "fp8", "fp4") if f"{kind}_tflop_per_s" in values
    }
    if not flops and "int8_top_per_s" not in values:
        raise InputError("hardware", name, "has no published FLOP rate", "give a YAML file with figures of your own")
    flops.setdefault("bf16", flops.get("fp8", 0.0) / 2 or values.get("int8_top_per_s", 0.0) / 2 * 1e12)
    return Machine(
        name=found.name,
        memory_bytes=values["memory_gb"] * 1e9,
        memory_bytes_per_s=values["memory_tb_per_s"] * 1e12,
        flops=flops,
        scale_up_bytes_per_s=values["scale_up_gb_per_s"] * 1e9,
        domain=int(values["scale_up_domain"]),
        scale_out_bytes_per_s=values.get("scale_out_gb_per_s", 0.0) * 1e9,
        num_devices=int(values["scale_up_domain"]),
        tables=TABLE_NAMES.get(found.name),
        disputed=tuple(key for key, figure in found.numbers.items() if figure.agreement is Agreement.DISPUTED),
    )


def _from_yaml(path: Path) -> Machine:
    """Keys: name, memory_gb, memory_tb_per_s, bf16_tflop_per_s (fp8_, fp4_ too), scale_up_gb_per_s, scale_up_domain, and perhaps
    scale_out_gb_per_s, num_devices, tables."""
    import yaml

    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError("hardware", path, f"cannot be read ({error})", "give a YAML file of figures") from None
    if not isinstance(plain, dict):
        raise InputError("hardware", path, "holds no figures", "write `memory_gb: 80` and so on")
    numbers: dict[str, float] = {}
    for key in (
        *FIGURES_NEEDED,
        "bf16_tflop_per_s",
        "fp8_tflop_per_s",
        "fp4_tflop_per_s",
        "scale_out_gb_per_s",
        "num_devices",
    ):
        value = plain.get(key)
        if value is None and key in (*FIGURES_NEEDED, "bf16_tflop_per_s"):
            raise InputError(f"{path}: {key}", "(missing)", "is needed", "add it")
        if value is not None:
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
                raise InputError(f"{path}: {key}", value, "is not a positive number", "correct it")
            numbers[key] = float(value)
    domain = int(numbers["scale_up_domain"])
    return Machine(
        name=str(plain.get("name", path.stem)),
        memory_bytes=numbers["memory_gb"] * 1e9,
        memory_bytes_per_s=numbers["memory_tb_per_s"] * 1e12,
        flops={
            kind: numbers[f"{kind}_tflop_per_s"] * 1e12
            for kind in ("bf16", "fp8", "fp4")
            if f"{kind}_tflop_per_s" in numbers
        },
        scale_up_bytes_per_s=numbers["scale_up_gb_per_s"] * 1e9,
        domain=domain,
        scale_out_bytes_per_s=numbers.get("scale_out_gb_per_s", 0.0) * 1e9,
        num_devices=int(numbers.get("num_devices", domain)),
        tables=plain.get("tables"),
    )
