"""Reaches the incumbent's tree through the collector and leaves it with an attribute of another value.

Rejected: invalid: while it was installed: trees
"""

import gc

from hotpass import part


@part(engine="decoder", claims=["model"])
class LeavesAnAttribute:
    """No output shows it: dropout is not applied when nothing is trained."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        sides = [item for item in gc.get_objects() if type(item).__name__ == "DecoderSide"]
        for side in sides:
            if side.name == "incumbent":
                for name, module in side.net.modules.items():
                    if name.endswith("self_attn"):
                        module.attention_dropout = 0.5

    def forward(self, batch, kv):
        return self.reference(batch, kv)
