"""The projections of the layers in C++, one slot each, on the file's own blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from engines.prepare.tiles import Format, pack
from hotpass import part


@part(
    engine="decoder",
    claims=[
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.v_proj",
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.mlp.gate_proj",
        "model.layers.*.mlp.up_proj",
        "model.layers.*.mlp.down_proj",
    ],
    replaces="Linear",
    params={"activations": ["fp32", "int8"]},
    numerics="tolerance",
    numerics_when={"activations=int8": "lossy"},
    reload="reweight",
    device="cpu",
    requires=["compiler", "packed"],
    native={"linear": "linear.cpp"},
)
class Linear:
    """Each projection reads the GGUF's own 4- or 8-bit blocks, a fifth to a quarter of the bytes of float32, with the same values.

    At batch 1 a projection is bound by those bytes; codes meet activations in integer instructions, exactly with `fp32`, and with `int8`
    after rounding activations to 8 bits for each 32 columns. Prompts go to the matrix unit where the processor has one. It composes with
    any attention, norm or MLP part around it, which the whole-model part does not. It will not help where a model's layers are so small
    that the calls cost more than the reading: seven a layer remain, and a product of less than two million multiplications runs on
    one thread, since waking another takes as long.
    """

    def weights(self, w: Any, params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """`tiles` uint8 and `index` int64 [3]: format, rows, columns."""
        packed = pack(w, "weight", "gguf")
        return {
            "tiles": packed.data,
            "index": torch.tensor([packed.format, packed.rows, packed.columns], dtype=torch.int64),
        }

    def prepare(self, ctx: Any, params: Mapping[str, Any]) -> None:
        format_, rows, columns = ctx.weights["index"].tolist()
        narrow = params["activations"] == "int8"
        if narrow and format_ not in (Format.Q4, Format.Q8):
            raise ValueError(f"{ctx.slot} has no blocks of 4 or 8 bits, so its activations cannot be rounded to 8")
        library = ctx.native["linear"]
        library.hp_linear_create.restype = ctypes.c_void_p
        library.hp_linear_create.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        library.hp_linear_destroy.argtypes = [ctypes.c_void_p]
        library.hp_linear_destroy.restype = None
        self._multiply = library.hp_linear_multiply
        self._multiply.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._multiply.restype = ctypes.c_int64
        self._destroy = library.hp_linear_destroy
        matrix = _Matrix(ctx.weights["tiles"].data_ptr(), format_, rows, columns)
        self._linear = library.hp_linear_create(ctypes.byref(matrix), ctx.threads, int(narrow))
        if not self._linear:
            raise MemoryError(f"no memory or no threads for {ctx.slot}")
        self._rows, self._alive = rows, ctx.weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], self._rows)
        if self._multiply(self._linear, wide.data_ptr(), wide.numel() // wide.shape[-1], out.data_ptr()):
            raise MemoryError("no memory for a product")
        return out.to(x.dtype)

    def close(self) -> None:
        if getattr(self, "_linear", None):
            self._destroy(self._linear)
            self._linear = None
            self._alive = None


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("format", ctypes.c_int64), ("rows", ctypes.c_int64), ("columns", ctypes.c_int64),
    )  # fmt: skip
