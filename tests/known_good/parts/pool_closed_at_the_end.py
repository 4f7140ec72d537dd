"""A pool of threads that lives while the part is installed, and is shut down in close."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

from hotpass import part


@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", reload="reweight")
class PoolClosedAtTheEnd:
    """The up projection on another thread."""

    def weights(self, w, params):
        return dict(w)

    def prepare(self, ctx, params):
        self.w, self.pool = ctx.weights, ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def up(self, x):
        with torch.inference_mode():
            return F.linear(x, self.w["up_proj.weight"])

    def forward(self, x):
        up = self.pool.submit(self.up, x)
        gate = F.silu(F.linear(x, self.w["gate_proj.weight"]))
        return F.linear(gate * up.result(), self.w["down_proj.weight"])

    def close(self):
        self.pool.shutdown(wait=True)
