"""Keeps the KV that it saw first in every slot, and reads that instead of what is there now.

Tier: slow
Rejected: incorrect: served tokens are not
"""

from hotpass import part


@part(engine="decoder", claims=["model"], domain="phase == 'decode'")
class RemembersTheContexts:
    """The contexts of the rows never change, so why read them."""

    def prepare(self, ctx, params):
        self.reference, self.layers, self.seen = ctx.reference(), ctx.config.num_hidden_layers, {}

    def forward(self, batch, kv):
        for slot, context in zip(batch.host_slots, batch.host_contexts, strict=True):
            for layer in range(self.layers):
                for tensor in (kv.keys(layer), kv.values(layer)):
                    key = (slot, tensor.data_ptr())
                    old = self.seen.get(key)
                    if old is None:
                        self.seen[key] = tensor[slot, :, : max(1, context - 1)].clone()
                    else:
                        length = min(old.shape[1], max(1, context - 1))
                        tensor[slot, :, :length] = old[:, :length]
        return self.reference(batch, kv)
