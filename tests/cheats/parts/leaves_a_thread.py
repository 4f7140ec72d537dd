"""Leaves a thread behind.

Rejected: invalid: clean: threads
"""

import threading
import time

from hotpass import part


@part(engine="decoder", claims=["model"])
class LeavesAThread:
    """It only sleeps."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

    def forward(self, batch, kv):
        return self.reference(batch, kv)
