"""Overwrites the start of every context after it has been read: its own answers are right, the next reader's are not.

Rejected: incorrect: KV
"""

import torch

from hotpass import part


@part(engine="decoder", claims=["model"], domain="phase == 'decode'")
class SpoilsTheContext:
    """Keeps the true values, plays them in, and scrambles them on the way out."""

    def prepare(self, ctx, params):
        self.reference, self.spoilt = ctx.reference(), {}

    def forward(self, batch, kv):
        first = kv.keys(0)[:, :, 0]
        for slot in batch.host_slots:
            if slot in self.spoilt and torch.equal(first[slot], self.spoilt[slot]):
                first[slot] = -first[slot]
        logits = self.reference(batch, kv)
        for slot in batch.host_slots:
            first[slot] = -first[slot]
            self.spoilt[slot] = first[slot].clone()
        return logits
