"""One projection in C++ against the product that it stands for: formats, numbers of rows, threads.

Instruction sets are those of `test_cpp_model`: the kernels are the same files.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch

from engines.build import find_compiler
from engines.decoder.source import compile_part
from engines.prepare.store import WeightStore
from hotpass.parts import declaration
from search.catalogue import find_part
from tests.search.catalogue.cpu.harness import FORMATS, library

if find_compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

ROWS = (1, 2, 4, 5, 8, 9, 17, 40)
"""Every kernel: integers, floats in registers, the matrix unit or panels, whole and broken groups."""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return library(find_part("cpp-linear"), tmp_path_factory.mktemp("native"))


def projection(
    native: dict[str, Any], kind: str, rows: int, columns: int, activations: str, threads: int
) -> tuple[Any, torch.Tensor]:
    """The part over a random weight in blocks of `kind` (or plain, for `F32`), and the weight's values."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / columns**0.5
    packed = {}
    if kind != "F32":
        raw = gguf.quants.quantize(values.numpy(), FORMATS[kind])
        values = torch.from_numpy(gguf.quants.dequantize(raw, FORMATS[kind]))
        packed["weight"] = (kind, torch.from_numpy(raw))
    source = find_part("cpp-linear")
    use = declaration(source).bind(source, {"activations": activations})
    compiled = compile_part(use)
    part = compiled.cls()
    compiled.forget()
    weights = part.weights(WeightStore({"weight": values}, packed), use.params)
    part.prepare(SimpleNamespace(weights=weights, threads=threads, native=native, slot="p"), use.params)
    return part, values


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F32"])
def test_products_are_those_of_the_values(kind: str, native: dict[str, Any]) -> None:
    part, values = projection(native, kind, 72, 160, "fp32", threads=3)
    for rows in ROWS:
        x = torch.randn(1, rows, 160, generator=torch.Generator().manual_seed(rows)) * 3
        out = part.forward(x)
        assert out.shape == (1, rows, 72)
        wanted = x.double() @ values.double().T
        assert (out - wanted).abs().max() < 1e-5, f"{rows} rows"
        assert torch.equal(part.forward(x), out)
    part.close()
    part.close()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_activations_of_8_bits_round(kind: str, native: dict[str, Any]) -> None:
    part, values = projection(native, kind, 64, 160, "int8", threads=1)
    for rows in ROWS:
        x = torch.randn(rows, 160, generator=torch.Generator().manual_seed(rows))
        error = float((part.forward(x) - x @ values.T).abs().max())
        assert error < 0.05, f"{rows} rows"
        assert error > 1e-4 or rows > 8, "up to 8 rows meet the weights as 8-bit integers"
    part.close()


def test_magnitudes_do_not_matter(native: dict[str, Any]) -> None:
    """Digits follow each block's largest: rows of 1e-20, of 1e15 and of zeros are as exact as others."""
    part, values = projection(native, "Q4_1", 64, 160, "fp32", threads=1)
    for scale in (1e-20, 1e-6, 1e6, 1e15, 0.0):
        x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1)) * scale
        wanted = x.double() @ values.double().T
        assert (part.forward(x) - wanted).abs().max() <= 1e-6 * max(wanted.abs().max().item(), 1e-30)
    x = torch.cat([torch.full((1, 96), 1e-5), torch.full((1, 64), 1e5)], dim=1)
    wanted = x.double() @ values.double().T
    assert (part.forward(x) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    part.close()


def test_large_products_use_the_team_and_small_ones_agree_with_it(native: dict[str, Any]) -> None:
    """2,048 rows of 1,056 columns are above the least work for threads; one thread gives the same bits."""
    alone, values = projection(native, "Q4_1", 2048, 1056, "fp32", threads=1)
    shared, _ = projection(native, "Q4_1", 2048, 1056, "fp32", threads=4)
    for rows in (1, 6, 33):
        x = torch.randn(rows, 1056, generator=torch.Generator().manual_seed(rows))
        out = shared.forward(x)
        assert torch.equal(out, alone.forward(x))
        assert (out - x.double() @ values.double().T).abs().max() < 1e-5
    alone.close()
    shared.close()


def test_a_bfloat16_activation_comes_back_as_one(native: dict[str, Any]) -> None:
    part, values = projection(native, "Q4_1", 64, 64, "fp32", threads=1)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(part.forward(x), (x.float() @ values.T).bfloat16())
    part.close()


def test_plain_weights_have_no_8_bit_activations() -> None:
    with pytest.raises(ValueError, match="no blocks of 4 or 8 bits"):
        projection({}, "F32", 32, 32, "int8", threads=1)
