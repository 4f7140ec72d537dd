"""Every linear layer over the CPU library's own packed layout."""

from __future__ import annotations

import torch

from hotpass import part


@part(
    engine="module",
    claims=["**"],
    replaces="Linear",
    numerics="tolerance",
    reload="reweight",
    device="cpu",
    requires=["isa:avx2"],
)
class PackedLinear:
    """The matrix is laid out once for the library's kernels, which a plain product does again, or does without, at each call; that is worth
    most with few rows. Sums are in another order. Packed matrices are private memory, as large as the weights themselves. It will not
    help where a layer's time is its own arithmetic over many rows, nor for layers so small that the call is most of their time.
    """

    def weights(self, w, params):
        return dict(w)

    def prepare(self, ctx, params):
        weight = ctx.weights["weight"]
        if weight.dtype != torch.float32:
            raise ValueError("packed-linear knows float32 weights only")
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = ctx.weights.get("bias")

    def forward(self, input):
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")

    def close(self):
        self.packed = None
