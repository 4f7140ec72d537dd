"""Holds the interpreter for a while after two in five of its own windows: most windows of the incumbent are as they were, and so is their
median, while their mean is what the candidate's speedup is made of.

Rejected: invalid: incumbent disturbed
"""

import threading
import time

from hotpass import part


@part(engine="decoder", claims=["model"])
class DisturbsTwoWindowsInFive:
    """In the way now and then."""

    def prepare(self, ctx, params):
        self.reference, self.ended, self.windows, self.open = ctx.reference(), 0.0, 0, True
        self.thread = threading.Thread(target=self.disturb, daemon=True)
        self.thread.start()

    def disturb(self):
        while self.open:
            time.sleep(0.0002)
            if self.windows % 5 in (1, 3) and 0.001 < time.monotonic() - self.ended < 0.06:
                until = time.monotonic() + 0.004
                while time.monotonic() < until:
                    pass

    def forward(self, batch, kv):
        if time.monotonic() - self.ended > 0.001:
            self.windows += 1
        self.ended = time.monotonic() + 1.0
        logits = self.reference(batch, kv)
        self.ended = time.monotonic()
        return logits

    def close(self):
        self.open = False
        self.thread.join()
