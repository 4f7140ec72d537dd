"""Halves of the feed-forward on two threads, joined before it returns."""

import threading

import torch
import torch.nn.functional as F

from hotpass import part


@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", reload="reweight")
class ThreadsJoinedInside:
    """Each half of the inner features is a partial sum of the output."""

    def weights(self, w, params):
        return dict(w)

    def prepare(self, ctx, params):
        self.w = ctx.weights

    def forward(self, x):
        gate, up, down = (self.w[f"{name}_proj.weight"] for name in ("gate", "up", "down"))
        half, parts = gate.shape[0] // 2, [None, None]

        def work(index):
            rows = slice(index * half, (index + 1) * half)
            with torch.inference_mode():
                gated = F.silu(F.linear(x, gate[rows])) * F.linear(x, up[rows])
                parts[index] = F.linear(gated, down[:, rows])

        threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return parts[0] + parts[1]
