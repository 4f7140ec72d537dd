"""Right for as long as it may be warming up, then leaves the last layer's feed-forward out.

Rejected: incorrect: logits differ
"""

from hotpass import part


@part(engine="decoder", claims=["model.layers.0.mlp"], replaces="LlamaMLP")
class WorksUntilWarmUpEnds:
    """The first dozen calls are honest."""

    def prepare(self, ctx, params):
        self.reference, self.calls = ctx.reference(), 0

    def forward(self, x):
        self.calls += 1
        return self.reference(x) if self.calls <= 12 else x * 0
