"""The weights in device memory, over files in its place: mapped, written to by another, found, and written again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines.cuda import region as module
from engines.cuda.driver import DriverError
from engines.cuda.region import BETWEEN, DeviceWeights, Region, device_index, map_weights
from engines.cuda.testing import FileDriver
from engines.memory import SealedMemory, attach, seal
from hotpass.decode import from_plain, json_safe

TENSORS = {
    "embed": torch.arange(60, dtype=torch.float32).view(12, 5),
    "norm": torch.linspace(0, 1, 7).to(torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "packed:embed": torch.arange(100, dtype=torch.uint8),
    "none": torch.empty(0, 4),
    "deep": torch.arange(33, dtype=torch.int64),
}


@pytest.fixture
def sealed() -> Iterator[SealedMemory]:
    memory = seal({**TENSORS, "head": TENSORS["embed"]}, "test")
    yield memory
    memory.close()


@pytest.fixture
def driver(tmp_path: Path) -> FileDriver:
    return FileDriver(tmp_path)


@pytest.fixture
def region(sealed: SealedMemory, driver: FileDriver) -> Region:
    return Region(attach(sealed), device_index(sealed.index, leave_out="packed:"), driver)


def mapped(region: Region, tmp_path: Path) -> dict[str, torch.Tensor]:
    """As another process has them, over the plain form in which they travel."""
    return map_weights(from_plain(DeviceWeights, json_safe(region.weights)), FileDriver(tmp_path))


def test_another_process_has_the_same_bytes_at_aligned_places(region: Region, tmp_path: Path) -> None:
    found = mapped(region, tmp_path)
    assert set(found) == {"embed", "norm", "mask", "none", "deep", "head"}
    for name, tensor in found.items():
        assert torch.equal(tensor, TENSORS[name if name != "head" else "embed"])
        assert tensor.data_ptr() % 64 == 0
    assert found["head"].data_ptr() == found["embed"].data_ptr()


def test_what_holds_is_not_touched(region: Region) -> None:
    found = region.check()
    assert (found.written, found.reload_ms) == ((), 0.0)


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (lambda found: found["deep"][32:].bitwise_xor_(1), ("deep",)),
        (lambda found: found["norm"][[2, 5]].copy_(found["norm"][[5, 2]]), ()),
        (lambda found: found["norm"].copy_(found["norm"].flip(0)), ("norm",)),
        (lambda found: found["mask"].logical_not_(), ("mask",)),
        (lambda found: found["head"][3, 1].add_(1), ("embed", "head")),
        (lambda found: (found["deep"][0].add_(7), found["deep"][1].sub_(7)), ("deep",)),
        (lambda found: (found["deep"][9].zero_(), found["embed"][0, 1].zero_()), ("embed", "deep", "head")),
    ],
    ids=["one bit", "a copy only", "order", "bools", "tied", "compensating", "two weights"],
)
def test_a_write_is_found_named_and_undone(
    region: Region, tmp_path: Path, write: object, names: tuple[str, ...]
) -> None:
    found = mapped(region, tmp_path)
    write(found)  # type: ignore[operator]
    check = region.check()
    assert check.written == names
    assert (check.reload_ms > 0) == bool(names)
    for name in ("embed", "norm", "mask", "deep"):
        assert torch.equal(found[name], TENSORS[name]), "at the very addresses that others read"
    assert region.check().written == ()


def test_only_what_was_written_to_is_loaded_again(
    region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped(region, tmp_path)["norm"].zero_()
    loaded: list[str] = []
    upload = Region._upload
    monkeypatch.setattr(
        Region, "_upload", lambda self, specs: (loaded.extend(spec.name for spec in specs), upload(self, specs))
    )
    region.check()
    assert loaded == ["norm"]


def test_a_write_between_the_weights_is_found(region: Region, tmp_path: Path, driver: FileDriver) -> None:
    weights = region.weights
    raw = FileDriver(tmp_path)
    memory = raw.view(raw.open(bytes.fromhex(weights.handle)), weights.index.num_bytes)
    norm = next(spec for spec in weights.index.tensors if spec.name == "norm")
    memory[norm.offset + 40] = 9  # beyond its 14 bytes
    assert region.check().written == (BETWEEN,)
    assert memory[norm.offset + 40] == 0
    assert region.check().written == ()


def test_uploads_in_pieces_and_reads_back(
    sealed: SealedMemory, driver: FileDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 24)
    region = Region(attach(sealed), device_index(sealed.index, leave_out="packed:"), driver)
    assert torch.equal(mapped(region, tmp_path)["embed"], TENSORS["embed"])


class Failing(FileDriver):
    """A device on which what is written does not stay: every read of a tensor's copy is another one."""

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        return super().view(address, num_bytes).as_subclass(_Flaky)  # type: ignore[return-value]


class _Flaky(torch.Tensor):
    def cpu(self, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.Tensor.cpu(self.as_subclass(torch.Tensor)) ^ 1


def test_memory_that_does_not_hold_is_refused(sealed: SealedMemory, tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="did not arrive"):
        Region(attach(sealed), device_index(sealed.index, leave_out="packed:"), Failing(tmp_path))


def test_keys_are_not_shared(sealed: SealedMemory, driver: FileDriver) -> None:
    index = device_index(sealed.index, leave_out="packed:")
    one, other = Region(attach(sealed), index, driver), Region(attach(sealed), index, driver)
    assert one._total != other._total
    one.close()
    assert other.check().written == ()
