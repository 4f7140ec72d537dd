"""The projections of the layers in the CPU libraries' own packed layouts."""

from __future__ import annotations

import warnings

import torch

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
    params={"storage": ["float32", "float16", "int8"]},
    numerics="tolerance",
    reload="reweight",
    numerics_when={"storage=float16,dtype=float32": "lossy", "storage=int8": "lossy"},
    device="cpu",
    requires=["isa:avx2"],
)
class PrepackedLinear:
    """The matrix is laid out once for the library's kernels, which a plain product redoes, or does without, at every call: with two to thirty
    rows (a batch, or a short prefill) that is much of its time. `float16` halves the bytes and keeps activations and sums in float32; the
    values of a bfloat16 model fit in float16 after one exact scaling, so there it is no narrowing. `int8` has a quarter of the bytes, one
    scale for each output row, and rounds activations to 8 bits over the whole batch. At batch 1 `float32` gains little, and a whole-model
    part saves the module calls as well. Packed matrices are private memory of the engine's process.
    """

    def weights(self, w, params):
        return _stored("weight", [w["weight"]], params["storage"])

    def prepare(self, ctx, params):
        self.linear = _packed(ctx.weights, "weight", params["storage"])

    def forward(self, x):
        return self.linear(x.float()).to(x.dtype)

    def close(self):
        self.linear = None


def _stored(name, matrices, storage):
    """The tensors that a builder keeps for one (fused) matrix [out, in]."""
    weight = (matrices[0] if len(matrices) == 1 else torch.cat(matrices)).float()
    if storage == "float16":  # a power of two brings the largest value near 2**15, so that small ones keep their bits
        shift = 2.0 ** (14 - torch.frexp(weight.abs().amax().clamp_min(1e-30)).exponent.double())
        return {name: (weight * shift.float()).to(torch.float16), f"{name}.scale": (1 / shift).float()}
    if storage == "int8":
        scale = (weight.abs().amax(dim=1) / 127).clamp_min(1e-30)
        return {name: (weight / scale[:, None]).round().to(torch.int8), f"{name}.scale": scale}
    return {name: weight}


def _packed(w, name, storage):
    """A function of float32 [rows, in] → float32 [rows, out] over the library's layout of the matrix."""
    weight = w[name]
    if storage == "float16":
        packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        scale = float(w[f"{name}.scale"])
        return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed).mul_(scale)
    if storage == "int8":
        with warnings.catch_warnings():  # the tensor type is deprecated, the packed product over it is not
            warnings.simplefilter("ignore", UserWarning)
            zero = torch.zeros(weight.shape[0], dtype=torch.int64)
            typed = torch._make_per_channel_quantized_tensor(weight, w[f"{name}.scale"].double(), zero, 0)
            packed = torch.ops.quantized.linear_prepack(typed, None)
        # Without VNNI, pairs of products of two full 8-bit numbers overflow 16 bits: activations then have 7 bits.
        reduced = not torch.cpu._is_vnni_supported()
        return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduced)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
