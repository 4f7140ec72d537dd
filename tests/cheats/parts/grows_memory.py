"""Keeps memory of the process for itself when it is taken off.

Rejected: invalid: clean: resident memory grew
"""

import torch

from hotpass import part


@part(engine="decoder", claims=["model"])
class GrowsMemory:
    """Half a gigabyte, under a name of torch's."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        torch.kept = torch.ones(600 << 18)

    def forward(self, batch, kv):
        return self.reference(batch, kv)
