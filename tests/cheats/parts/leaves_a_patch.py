"""Replaces a function that the incumbent uses with one that waits.

Rejected: invalid: clean: patched .*silu
"""

import torch.nn.functional as F

from hotpass import part


@part(engine="decoder", claims=["model"])
class LeavesAPatch:
    """A little slower for everyone."""

    def prepare(self, ctx, params):
        self.reference, silu = ctx.reference(), F.silu
        F.silu = lambda x, inplace=False: silu(x, inplace)

    def forward(self, batch, kv):
        return self.reference(batch, kv)
