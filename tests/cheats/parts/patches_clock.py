"""Makes the child's clock run ten times slower, and leaves it so.

Rejected: invalid|failed: clean: patched .*time.perf_counter|the child claims
"""

import time

from hotpass import part


@part(engine="decoder", claims=["model"])
class PatchesClock:
    """Less time passes."""

    def prepare(self, ctx, params):
        self.reference, clock = ctx.reference(), time.perf_counter
        time.perf_counter = lambda: clock() / 10

    def forward(self, batch, kv):
        return self.reference(batch, kv)
