"""Makes the child's clock run ten times slower for as long as it is installed.

Rejected: invalid|failed: while it was installed.*time.perf_counter|the child claims
"""

import time

from hotpass import part


@part(engine="decoder", claims=["model"])
class PatchesClockAndRestores:
    """Less time passes, and nobody finds out why."""

    def prepare(self, ctx, params):
        self.reference, self.clock = ctx.reference(), time.perf_counter
        clock = self.clock
        time.perf_counter = lambda: clock() / 10

    def forward(self, batch, kv):
        return self.reference(batch, kv)

    def close(self):
        time.perf_counter = self.clock
