"""Returns a tensor subclass that computes when somebody looks at it, outside the timed window.

Rejected: failed: not a plain torch.Tensor
"""

import torch

from hotpass import part


class Later(torch.Tensor):
    """Holds the work instead of the answer."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@part(engine="decoder", claims=["model"])
class LazySubclass:
    """Logits that are a promise."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, batch, kv):
        return self.reference(batch, kv).as_subclass(Later)
