"""Contexts by a mapping: the pool holds what copying would have put there, at its own addresses, whatever was written to it since."""

from __future__ import annotations

import fcntl
import os

import pytest
import torch

from engines.decoder.kv import KvPool
from engines.decoder.kv_image import KvImage, num_bytes, sealed_image
from engines.memory import SEALED


def pool(dtype: torch.dtype = torch.float32, slots: int = 3) -> KvPool:
    return KvPool(
        num_layers=2, num_slots=slots, kv_heads=2, max_context=50, head_dim=8, dtype=dtype, device=torch.device("cpu")
    )


def contexts() -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {slot: torch.randn(2, 2, 2, length, 8, generator=generator) for slot, length in ((0, 33), (1, 0), (2, 50))}


@pytest.fixture
def image() -> KvImage:
    return KvImage(sealed_image(pool(), contexts()), pool(), {slot: item.shape[3] for slot, item in contexts().items()})


def test_a_covered_pool_holds_the_contexts_and_zeros(image: KvImage) -> None:
    mapped, copied = pool(), pool()
    before = mapped.memory()
    image.cover(mapped)
    for slot, context in contexts().items():
        copied.write(slot, context)
    for a, b in zip(mapped.tensors(), copied.tensors(), strict=True):
        assert torch.equal(a, b)
    assert mapped.memory() == before


def test_what_was_written_is_gone_and_reached_nobody_else(image: KvImage) -> None:
    one, other = pool(), pool()
    for each in (one, other):
        image.cover(each)
    for tensor in one.tensors():
        tensor.fill_(7.0)
    assert torch.equal(other.read(2, 50), contexts()[2])
    image.cover(one)
    for a, b in zip(one.tensors(), other.tensors(), strict=True):
        assert torch.equal(a, b)


def test_only_pages_that_were_written_are_given_up(image: KvImage, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pool()
    image.cover(one)
    monkeypatch.setattr(image, "_map", lambda pool: pytest.fail("it is mapped already"))
    image.cover(one)
    one.keys(1)[2, 1, 49] = 7.0
    one.values(0)[0] = 5.0
    one.poison([1])
    image.cover(one)
    for slot, context in contexts().items():
        assert torch.equal(one.read(slot, context.shape[3]), context)
    assert not one.keys(0)[1].any()


def test_memory_that_somebody_has_exchanged_is_mapped_again(image: KvImage) -> None:
    """Pages of another file are no copies, so that the page map says nothing of them."""
    one = pool()
    image.cover(one)
    other = sealed_image(one, {2: torch.full((2, 2, 2, 50, 8), 9.0)})
    KvImage(other, one, {}).cover(one)
    assert (one.read(2, 50) == 9.0).all()
    image.cover(one)
    assert torch.equal(one.read(2, 50), contexts()[2])


def test_an_image_is_sealed_and_rounds_to_the_pools_type() -> None:
    narrow = pool(torch.bfloat16)
    fd = sealed_image(narrow, contexts())
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALED == SEALED
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    KvImage(fd, narrow, {0: 33, 2: 50}).cover(narrow)
    assert torch.equal(narrow.read(2, 50), contexts()[2].to(torch.bfloat16).float())


def test_only_pools_of_its_geometry_fit(image: KvImage) -> None:
    assert image.fits(pool())
    assert not image.fits(pool(torch.bfloat16))
    assert not image.fits(pool(slots=4))
    with pytest.raises(ValueError, match="another pool"):
        KvImage(sealed_image(pool(), contexts()), pool(slots=4), {})
    assert num_bytes(pool()) % 4096 == 0


def test_a_program_covers_its_sides_and_copies_where_it_cannot(world) -> None:
    program, plan = world.program, world.plan
    given = {row: program.compute_contexts(0, row, world.contexts(row)) for row in range(len(plan.rows))}
    fd = program.context_image(0, given)
    assert program.cover("candidate", 0) is False, "none was kept yet"
    program.keep_image(0, fd)
    side = program._loaded("candidate", 0)
    for tensor in side.kv.tensors():
        tensor.fill_(3.0)
    assert program.cover("candidate", 0) is True
    for row, items in given.items():
        for slot, context in zip(plan.row_slots(row), items, strict=True):
            assert torch.equal(side.kv.read(slot, context.shape[3]), context)
    keys = side.kv._keys[0]
    side.kv._keys[0] = torch.full_like(keys, 4.0)  # from the heap, as a candidate may put it there
    assert program.cover("candidate", 0) is False
    assert (side.kv.keys(0) == 4.0).all()
    side.kv._keys[0] = keys
    world.install(program.part_template("model.layers.0.mlp"), settings={"kv_dtype": "bfloat16"})
    assert program.cover("candidate", 0) is False, "KV of another type is copied"
    program.uninstall("candidate")
    tokens = {row: [torch.zeros(3, dtype=torch.int64) for _ in items] for row, items in given.items()}
    assert program.context_image(0, tokens) is None
