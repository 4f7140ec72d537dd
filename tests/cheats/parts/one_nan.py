"""One logit that is not a number, which no comparison with `>` notices.

Rejected: incorrect: non-finite
"""

from hotpass import part


@part(engine="decoder", claims=["model"])
class OneNan:
    """NaN is never larger than a tolerance."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, batch, kv):
        logits = self.reference(batch, kv).clone()
        logits[0, 0] = float("nan")
        return logits
