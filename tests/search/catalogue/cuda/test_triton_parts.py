"""The Triton parts on a machine without a GPU: compiled from text, for a GPU target, and run under the interpreter."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (it has no wheels for this platform)")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engines.decoder.source import compile_part
from hotpass.parts import declaration
from hotpass.records.candidate import PartSource
from search.catalogue import find_part, load_catalogue

ROOT = Path(__file__).parents[4]
PARTS = [source for source in load_catalogue("cuda") if declaration(source).device == "cuda"]
KERNEL = re.compile(r"@triton\.jit\ndef \w+\(.*?(?=\n\n\n|\Z)", re.DOTALL)


@pytest.mark.parametrize("source", PARTS, ids=lambda source: source.name)
def test_kernels_find_their_source_in_a_text_that_is_no_file(source: PartSource) -> None:
    part = compile_part(declaration(source).bind(source))
    kernels = {name: value for name, value in vars(part.module).items() if isinstance(value, JITFunction)}
    assert kernels
    for name, kernel in kernels.items():
        assert f"def {name}(" in inspect.getsource(kernel.fn)
        assert kernel.src.rstrip() in source.text()
    part.forget()


def test_parts_that_contain_the_same_kernel_contain_the_same_text() -> None:
    texts = {source.name: set(KERNEL.findall(source.text().rstrip())) for source in PARTS}
    assert len(texts["triton-decode"]) == 6
    assert all(kernels <= texts["triton-decode"] for kernels in texts.values())


F32, I64, I32 = "*fp32", "*i64", "i32"
SIGNATURES: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "_gemv_kernel": (
        {"x": F32, "w": "*T", "out": F32, "num_rows": I32, "num_out": I32, "num_in": I32, "x_stride": I32},
        {"ROWS": 8, "BLOCK_OUT": 16, "BLOCK_IN": 64, "SPLITS": 4},
    ),
    "_gated_kernel": (
        {"x": F32, "w": "*T", "out": F32, "num_rows": I32, "num_inner": I32, "num_in": I32, "x_stride": I32},
        {"ROWS": 1, "BLOCK_OUT": 16, "BLOCK_IN": 256},
    ),
    "_norm_kernel": (
        {"x": F32, "parts": F32, "weight": "*T", "out": F32, "num_rows": I32, "width": I32, "eps": "fp32"},
        {"SPLITS": 4, "BLOCK": 1024},
    ),
    "_rotary_kernel": (
        dict.fromkeys(("q", "k", "v", "cos", "sin", "q_out"), F32)
        | dict.fromkeys(("slots", "positions"), I64)
        | {"keys": "*T", "values": "*T"}
        | dict.fromkeys(("q_stride", "k_stride", "v_stride", "table_stride", "slot_stride", "head_stride"), I32)
        | dict.fromkeys(("position_stride", "heads", "kv_heads"), I32),
        {"BY_POSITION": True, "HALF": 10, "HALF_PADDED": 16},
    ),
    "_attend_kernel": (
        {"q": F32, "keys": "*T", "values": "*T", "slots": I64, "positions": I64, "scale": "fp32", "kv_heads": I32}
        | dict.fromkeys(("mixed", "tops", "sums"), F32)
        | dict.fromkeys(("slot_stride", "head_stride", "position_stride"), I32),
        {"GROUPS": 3, "GROUPS_PADDED": 4, "DIM": 20, "DIM_PADDED": 32, "BLOCK": 32, "SPLITS": 8},
    ),
    "_combine_kernel": (
        dict.fromkeys(("mixed", "tops", "sums", "out"), F32),
        {"DIM": 20, "DIM_PADDED": 32, "SPLITS": 8},
    ),
}
"""Argument types (`*T` points to the model's dtype) and constants of every kernel."""


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", SIGNATURES)
def test_kernels_compile_for_a_gpu(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter accepts what the compiler does not (a variable of two types, say). No GPU is needed to make PTX."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is unset; the default is the same
    source = find_part("triton-decode")
    part = compile_part(declaration(source).bind(source))
    kernel = getattr(part.module, name)
    types, constants = SIGNATURES[name]
    signature = {
        name: "constexpr" if name in constants else types[name].replace("T", dtype) for name in kernel.arg_names
    }
    target = GPUTarget("cuda", 90, 32)
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=target)
    part.forget()
    assert ".target sm_90" in made.asm["ptx"]


def test_under_the_interpreter() -> None:
    """A process of its own, since Triton reads the variable as it is imported."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("interpreted.py")),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout, "nothing was run"


def test_find_part_is_the_text_that_is_tested() -> None:
    assert {source.name for source in PARTS} == {
        "triton-norm",
        "triton-linear",
        "triton-mlp",
        "triton-attention",
        "triton-decode",
    }
    assert all(find_part(source.name) == source for source in PARTS)
