"""Sleeps in two of five windows of the incumbent, from a signal's handler that tells by the frames whose window it interrupts: most windows
are as they were, and so is their median, while their mean is what the candidate's speedup is made of.

Rejected: invalid: incumbent disturbed
"""

import signal
import time

from hotpass import part


@part(engine="decoder", claims=["model"])
class DisturbsTwoWindowsInFive:
    """In the way now and then."""

    last, windows = None, 0

    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        signal.signal(signal.SIGALRM, type(self).interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

    @classmethod
    def interrupt(cls, number, frame):
        while frame is not None and frame.f_code.co_name != "run_window":
            frame = frame.f_back
        if frame is None or getattr(frame.f_locals["side"], "name", frame.f_locals["side"]) != "incumbent":
            return
        nonce = frame.f_locals["inputs"].nonce
        if nonce != cls.last:
            cls.last, cls.windows = nonce, cls.windows + 1
            if cls.windows % 5 in (1, 3):
                time.sleep(0.8)

    def forward(self, batch, kv):
        return self.reference(batch, kv)

    def close(self):
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
