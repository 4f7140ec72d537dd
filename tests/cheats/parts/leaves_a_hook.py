"""Leaves a hook on every module's forward.

Rejected: invalid: clean: module_hooks
"""

import torch

from hotpass import part


@part(engine="decoder", claims=["model"])
class LeavesAHook:
    """Still there when it is gone."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)

    def forward(self, batch, kv):
        return self.reference(batch, kv)
