"""The Triton parts under Triton's interpreter: `test_triton_parts` runs this file in a process of its own, with TRITON_INTERPRET=1.

Kernels run on CPU tensors, one program after another in Python, so sizes are small and odd on purpose: what a mask or a stride gets wrong
shows there. The whole parts run in the decoder program, with the one word changed that keeps them off a CPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from engines.decoder.source import compile_part
from engines.program import KvPlan
from hotpass.parts import declaration
from hotpass.records.candidate import PartSource
from hotpass.records.shapes import Phase
from search.catalogue import find_part, load_catalogue
from tests.search.catalogue.programs import Bench, shape

NAMES = [source.name for source in load_catalogue("cuda") if declaration(source).device == "cuda"]
SIZES = {"layers": 2, "hidden": 60, "heads": 6, "kv_heads": 2, "intermediate": 50}
"""Three query heads for each key head and head dimension 10: nothing is a power of two."""
ROWS = (shape(Phase.DECODE, 3, 3, 14, 20), shape(Phase.PREFILL, 2, 5, 0))
PLAN = KvPlan(rows=ROWS, steps_per_window=(1, 1), serving_slots=0, serving_context=0)
BOUND = {"splits": 1, "context_splits": 4}
"""Parameter values of the whole parts: few programs, since the interpreter runs them one by one; kernels alone are split further."""

EXACT_LIMIT = 5e-5
NARROW_FACTOR = 1.6
"""As for the PyTorch parts: of what the loaded bfloat16 model is off by."""
CAST_STEP = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
"""The interpreter cuts a bfloat16 off where a GPU rounds it: one step of its mantissa."""


def on_any_device(name: str) -> PartSource:
    source = find_part(name)
    changed = tuple((path, text.replace('device="cuda"', 'device="any"')) for path, text in source.files)
    return dataclasses.replace(source, files=changed)


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    source = find_part("triton-decode")
    part = compile_part(declaration(source).bind(source))
    yield part.module
    part.forget()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("model"), request.param, sizes=SIZES, plan=PLAN)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "num_out", "num_in", "splits"), [(1, 16, 128, 1), (3, 37, 130, 4), (8, 5, 7, 8), (2, 33, 300, 1)]
)
def test_gemv(kernels: ModuleType, dtype: torch.dtype, rows: int, num_out: int, num_in: int, splits: int) -> None:
    wide = random(rows, num_in + 3)
    x, w = wide[:, :num_in], random(num_out, num_in, dtype=dtype, seed=1)
    parts = kernels._gemv(x, w, splits)
    assert parts.shape == (splits, rows, num_out)
    torch.testing.assert_close(parts.sum(dim=0), (x.double() @ w.double().T).float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "num_in"), [(1, 16, 128), (3, 21, 131), (8, 5, 9)])
def test_gated(kernels: ModuleType, dtype: torch.dtype, rows: int, inner: int, num_in: int) -> None:
    x, w = random(rows, num_in), random(2 * inner, num_in, dtype=dtype, seed=1)
    gate, up = (x.double() @ w.double().T).chunk(2, dim=1)
    torch.testing.assert_close(kernels._gated(x, w), (F.silu(gate) * up).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "splits"), [(1, 0), (7, 1), (120, 3), (128, 8)])
def test_residual_norm(kernels: ModuleType, dtype: torch.dtype, width: int, splits: int) -> None:
    x, weight = random(3, width), random(width, dtype=dtype, seed=1)
    parts = random(splits, 3, width, seed=2) if splits else None
    wanted = x + parts.sum(dim=0) if splits else x.clone()
    out = kernels._add_norm(x, parts, weight, 1e-5)
    torch.testing.assert_close(x, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, F.rms_norm(wanted, (width,), weight.float(), 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "splits"), [(1, 1, 2, 1), (9, 3, 20, 4), (4, 4, 16, 2)])
def test_rotary_write_and_flash_decode(
    kernels: ModuleType, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, splits: int
) -> None:
    contexts, slots = [0, 1, 31, 32, 77], [6, 0, 3, 5, 1]
    n = len(contexts)
    qkv = random(n, (heads + 2 * kv_heads) * dim)
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    angles = random(96, dim // 2, seed=3)
    tables = [angles.cos(), angles.sin()]
    keys, values = (torch.full((7, kv_heads, 96, dim), float("nan"), dtype=dtype) for _ in range(2))
    for (slot, context), (cache, seed) in itertools.product(
        zip(slots, contexts, strict=True), ((keys, 4), (values, 5))
    ):
        cache[slot, :, :context] = random(kv_heads, context, dim, dtype=dtype, seed=seed + context)
    batch = SimpleNamespace(slots=torch.tensor(slots), positions=torch.tensor(contexts))
    out = kernels._attention(q, k, v, tables, True, batch, keys, values, (heads, kv_heads, dim), splits)

    for row, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        turned = rotated(torch.cat([q[row], k[row]]).view(-1, dim), tables[0][context], tables[1][context])
        for cache, stored in ((keys, turned[heads:]), (values, v[row].view(kv_heads, dim))):
            torch.testing.assert_close(cache[slot, :, context].float(), stored, rtol=CAST_STEP[dtype], atol=1e-6)
        assert keys[slot, :, context + 1 :].isnan().all(), "nothing is written beyond the position"
        seen_k, seen_v = (cache[slot, :, : context + 1].double() for cache in (keys, values))
        grouped = turned[:heads].double().view(kv_heads, heads // kv_heads, dim)
        weights = torch.softmax(grouped @ seen_k.transpose(1, 2) * dim**-0.5, dim=-1)
        torch.testing.assert_close(out[row].view(kv_heads, -1, dim), (weights @ seen_v).float(), rtol=1e-5, atol=1e-5)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


@pytest.mark.parametrize("name", NAMES)
def test_part_is_within_its_class(bench: Bench, name: str) -> None:
    source = on_any_device(name)
    known = declaration(source).params
    bench.install(source, {name: value for name, value in BOUND.items() if name in known})
    loaded = max(bench.error(ran, row) for row, ran in enumerate(bench.loaded))
    limit = EXACT_LIMIT if bench.model.dtype == "float32" else NARROW_FACTOR * loaded
    for row in bench.rows:
        ran = bench.run("candidate", row)
        if bench.serves(source, row):
            assert min(ran.activation.values()) > 0
            assert bench.error(ran, row) <= limit, f"row {row}"
        else:
            assert torch.equal(ran.logits, bench.loaded[row].logits)
