"""Leaves the first layer's feed-forward out.

Rejected: incorrect: logits differ
"""

from hotpass import part


@part(engine="decoder", claims=["model.layers.0.mlp"], replaces="LlamaMLP")
class SkipsALayer:
    """A residual stream goes on without it."""

    def forward(self, x):
        return x * 0
