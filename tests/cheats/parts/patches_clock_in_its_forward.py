"""Turns the child's clock back by most of the step while it runs; outside its forward nothing is patched.

Rejected: invalid|failed: clocks disagree|the child claims
"""

import engines.decoder.windows as windows
from hotpass import part


class Clock:
    """Stands in for the module `time` in one frame; a part of what has passed is kept from it."""

    def __init__(self, time):
        self.time, self.hidden = time, 0.0

    def perf_counter(self):
        return self.time.perf_counter() - self.hidden


@part(engine="decoder", claims=["model"])
class PatchesClockInItsForward:
    """The window began later than it did, says the child."""

    def prepare(self, ctx, params):
        self.reference, self.real = ctx.reference(), windows.time
        self.clock = Clock(self.real)

    def forward(self, batch, kv):
        start = self.real.perf_counter()
        logits = self.reference(batch, kv)
        self.clock.hidden += (self.real.perf_counter() - start) * 0.95
        windows.time = self.clock
        return logits

    def close(self):
        windows.time = self.real
