"""Burns the interpreter's time on a thread of its own whenever the incumbent runs.

Rejected: invalid: incumbent disturbed
"""

import threading
import time

from hotpass import part


@part(engine="decoder", claims=["model"])
class SpinsBesideTheIncumbent:
    """Idle while it is measured, busy while the other is."""

    def prepare(self, ctx, params):
        self.reference, self.last, self.open = ctx.reference(), 0.0, True
        self.thread = threading.Thread(target=self.spin, daemon=True)
        self.thread.start()

    def spin(self):
        while self.open:
            if time.monotonic() - self.last < 0.001:
                time.sleep(0.0005)

    def forward(self, batch, kv):
        self.last = time.monotonic() + 1.0
        logits = self.reference(batch, kv)
        self.last = time.monotonic()
        return logits

    def close(self):
        self.open = False
        self.thread.join()
