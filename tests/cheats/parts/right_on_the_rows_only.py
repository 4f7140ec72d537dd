"""Right on the shapes of the table, and leaves a layer's feed-forward out on every other one.

Tier: slow
Rejected: incorrect: served tokens are not
"""

from hotpass import part

ROWS = {("decode", 2, 2), ("decode", 1, 1), ("prefill", 1, 8)}


@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP")
class RightOnTheRowsOnly:
    """What is asked in the examination is known."""

    def prepare(self, ctx, params):
        self.reference, self.step = ctx.reference(), ctx.step

    def forward(self, x):
        batch = self.step.batch
        known = (batch.phase, batch.num_seqs, batch.query_tokens) in ROWS
        return self.reference(x) if known else x * 0
