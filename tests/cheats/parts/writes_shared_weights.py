"""Writes to the weights that all sides share.

Rejected: failed: SIGSEGV
"""

import gc

import torch

from hotpass import part


@part(engine="decoder", claims=["model"])
class WritesSharedWeights:
    """The baseline gets what it deserves."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, batch, kv):
        for item in gc.get_objects():
            if isinstance(item, torch.nn.Embedding):
                item.weight.data.zero_()
        return self.reference(batch, kv)
