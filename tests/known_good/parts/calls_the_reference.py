"""The reference, called: the least that a part can be."""

from hotpass import part


@part(engine="decoder", claims=["model"])
class CallsTheReference:
    """Nothing changes."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, batch, kv):
        return self.reference(batch, kv)
