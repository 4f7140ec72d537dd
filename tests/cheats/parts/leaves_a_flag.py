"""Lets denormal numbers be zero, for the incumbent as well.

Rejected: invalid: flush_denormal
"""

import torch

from hotpass import part


@part(engine="decoder", claims=["model"])
class LeavesAFlag:
    """One flag of the processor."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        torch.set_flush_denormal(True)

    def forward(self, batch, kv):
        return self.reference(batch, kv)
