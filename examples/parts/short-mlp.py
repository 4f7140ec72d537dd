"""A person's part to try: `hotpass try examples/parts/short-mlp.py`."""

import torch
import torch.nn.functional as F

from hotpass import part


@part(
    engine="decoder",
    claims=["model.layers.*.mlp"],
    replaces="LlamaMLP",
    domain="num_seqs <= 4",
    params={"fuse": [True, False]},
    numerics="tolerance",
    reload="reweight",
)
class ShortMlp:
    """Gate and up projection as one product, SiLU in place: three calls less a layer, which a decode step of a small model notices. At
    larger batches the products dominate, so there the loaded MLP runs.
    """

    def weights(self, w, params):
        gate, up, down = (w[f"{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (
            {"gate_up": torch.cat([gate, up]), "down": down}
            if params["fuse"]
            else {"gate": gate, "up": up, "down": down}
        )

    def prepare(self, ctx, params):
        self.w, self.fuse = ctx.weights, params["fuse"]

    def forward(self, x):
        if self.fuse:
            gate, up = F.linear(x, self.w["gate_up"]).chunk(2, dim=-1)
        else:
            gate, up = F.linear(x, self.w["gate"]), F.linear(x, self.w["up"])
        return F.linear(F.silu(gate).mul_(up), self.w["down"])
