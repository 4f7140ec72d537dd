"""The weights in a GPU's memory: one allocation of the keeper's, mapped by every child, checked and repaired by the keeper.

    keeper: sealed CPU memory ──upload, read back──► allocation ──handle──► child: tensors over the same bytes, nothing copied
            after each candidate: checksum of it all ── as at upload? ──► else of each weight ──► those re-loaded from the sealed memory

Device memory has no seal: whoever maps it may write to it. So it is looked at by a process that candidates have no way into, under a
key that they never see. A repair writes the same bytes to the same places, so that addresses in captured graphs stay right.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engines.cuda.checksum import WORD_BYTES, checksum
from engines.cuda.driver import Driver, DriverError
from engines.memory import ALIGNMENT, MemoryIndex, TensorSpec, tensor_over

CHUNK_BYTES = 64 << 20
"""Uploaded and read back at a time."""
BETWEEN = "(between the weights)"
"""What a write outside of any weight is called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceWeights:
    """Where a child finds the weights on the device."""

    handle: str
    """Hex digits of the driver's handle to the allocation."""
    index: MemoryIndex
    """Its tensors; offsets from its start."""
    phases_ms: Mapping[str, float]
    """`upload` (with the reading back) and `checksum`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCheck:
    """What the keeper found in the device's weights, and what it did about it."""

    written: tuple[str, ...]
    """Weights that were not what was uploaded (tied ones under each name); they are again. Empty when all held."""
    check_ms: float
    reload_ms: float
    """Writing those weights again, and the check after it; 0 when all held."""


def device_index(index: MemoryIndex, leave_out: str) -> MemoryIndex:
    """The tensors of a memory file, those left out whose names begin so, moved together; what shared a place shares one again."""
    places: dict[int, int] = {}
    specs: list[TensorSpec] = []
    end = 0
    for spec in index.tensors:
        if spec.name.startswith(leave_out):
            continue
        offset = places.setdefault(spec.offset, end)
        end = max(end, -(-(offset + spec.num_bytes) // ALIGNMENT) * ALIGNMENT)
        specs.append(replace(spec, offset=offset))
    return MemoryIndex(tensors=tuple(specs), num_bytes=max(end, ALIGNMENT))


class Region:
    """The keeper's own: one allocation that holds the weights."""

    def __init__(self, sealed: Mapping[str, torch.Tensor], index: MemoryIndex, driver: Driver) -> None:
        """`sealed`: name → tensor in sealed memory, the truth from now on. Raises DriverError when they do not arrive as they are."""
        self._sealed, self._index, self._driver = sealed, index, driver
        self._key = secrets.randbits(64)
        start = time.perf_counter()
        self._address = driver.allocate(index.num_bytes)
        self._memory = driver.view(self._address, index.num_bytes)
        self._upload(self._specs())
        uploaded = time.perf_counter()
        self._sums = {spec.offset: self._sum(spec) for spec in self._specs()}
        self._total = checksum(self._memory, self._key)
        self.weights = DeviceWeights(
            handle=driver.export(self._address).hex(),
            index=index,
            phases_ms={"upload": (uploaded - start) * 1e3, "checksum": (time.perf_counter() - uploaded) * 1e3},
        )

    def check(self) -> DeviceCheck:
        """Look at every byte; write again what is not as it was. Raises DriverError when that does not help."""
        start = time.perf_counter()
        held = checksum(self._memory, self._key) == self._total
        written = [] if held else [spec for spec in self._specs() if self._sum(spec) != self._sums[spec.offset]]
        checked = time.perf_counter()
        if not held:
            self._upload(written or self._specs())
            if checksum(self._memory, self._key) != self._total:
                raise DriverError(
                    "weights that were written again are not what they were: the device's memory does not hold"
                )
        places = {spec.offset for spec in written}
        names = [spec.name for spec in self._index.tensors if spec.offset in places and spec.num_bytes]
        return DeviceCheck(
            written=tuple(names) if held or names else (BETWEEN,),
            check_ms=(checked - start) * 1e3,
            reload_ms=0.0 if held else (time.perf_counter() - checked) * 1e3,
        )

    def close(self) -> None:
        """Give the memory back; once no child has it open."""
        self._memory = torch.empty(0)
        self._driver.free(self._address)

    def _specs(self) -> list[TensorSpec]:
        """One for each place that holds something."""
        return list({spec.offset: spec for spec in self._index.tensors if spec.num_bytes}.values())

    def _span(self, spec: TensorSpec) -> torch.Tensor:
        """Its bytes, up to a whole word: what follows it up to the next 64-byte boundary is nobody's, and zero."""
        return self._memory[spec.offset : spec.offset + -(-spec.num_bytes // WORD_BYTES) * WORD_BYTES]

    def _sum(self, spec: TensorSpec) -> int:
        return checksum(self._span(spec), self._key, spec.offset)

    def _upload(self, specs: list[TensorSpec]) -> None:
        self._clear_gaps()
        for spec in specs:
            source = self._sealed[spec.name].reshape(-1).view(torch.uint8)
            for begin in range(0, spec.num_bytes, CHUNK_BYTES):
                piece = source[begin : begin + CHUNK_BYTES]
                at = spec.offset + begin
                target = self._memory[at : at + piece.numel()]
                target.copy_(piece)
                if not torch.equal(target.cpu(), piece):
                    raise DriverError(f"{spec.name} did not arrive on the device as it is")
        self._driver.synchronize()

    def _clear_gaps(self) -> None:
        """Zero between the tensors, so that the checksum of it all is known for every byte."""
        end = 0
        for spec in sorted(self._specs(), key=lambda item: item.offset):
            self._memory[end : spec.offset].zero_()
            end = spec.offset + spec.num_bytes
        self._memory[end:].zero_()


def map_weights(weights: DeviceWeights, driver: Driver) -> dict[str, torch.Tensor]:
    """In a child: the keeper's weights as tensors on the device, for the life of the process. Raises DriverError."""
    memory = driver.view(driver.open(bytes.fromhex(weights.handle)), weights.index.num_bytes)
    return {spec.name: tensor_over(memory, spec) for spec in weights.index.tensors}
