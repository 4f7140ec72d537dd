"""Keeps what depends on the shape only (a mask, tables), keyed by everything that it depends on."""

import torch

from hotpass import part


@part(engine="decoder", claims=["model"])
class CacheWithTheWholeKey:
    """A cache is no cheat when its key is whole."""

    def prepare(self, ctx, params):
        self.reference, self.masks = ctx.reference(), {}

    def forward(self, batch, kv):
        key = (batch.query_tokens, batch.context)
        if key not in self.masks:
            self.masks[key] = torch.ones(batch.query_tokens, batch.context + batch.query_tokens).tril(batch.context)
        return self.reference(batch, kv)
