"""Leaves a process behind that goes on computing.

Rejected: invalid: clean: [0-9]+ processes left behind
"""

import os
import time

from hotpass import part


@part(engine="decoder", claims=["model"])
class LeavesAProcess:
    """Somebody else's work, on the same cores."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)

    def forward(self, batch, kv):
        return self.reference(batch, kv)
