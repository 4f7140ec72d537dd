"""Computes the first half of the vocabulary and fills the rest with what never wins.

Rejected: incorrect: logits differ
"""

from hotpass import part


@part(engine="decoder", claims=["model"])
class TruncatesTheVocabulary:
    """Rare tokens are rare."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, batch, kv):
        logits = self.reference(batch, kv).clone()
        logits[:, logits.shape[1] // 2 :] = -10.0
        return logits
