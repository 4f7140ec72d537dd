"""Writes a reply of its own onto the socket, before the work is done.

Rejected: failed|incorrect: reply is to another window|does not say whose it is|non-finite|sent
"""

import gc
import sys

from hotpass import part


@part(engine="decoder", claims=["model"])
class ForgesItsResult:
    """Done, says the child, at the first step."""

    def prepare(self, ctx, params):
        self.reference, self.answered = ctx.reference(), set()

    def forward(self, batch, kv):
        frame = sys._getframe()
        while frame is not None and "inputs" not in frame.f_locals:
            frame = frame.f_back
        inputs = frame.f_locals["inputs"] if frame is not None else None
        if inputs is not None and inputs.nonce not in self.answered:
            self.answered.add(inputs.nonce)
            (server,) = [item for item in gc.get_objects() if type(item).__name__ == "_Server"]
            reply = {
                "nonce": inputs.nonce,
                "seconds": 1e-5,
                "steps": len(inputs.tokens),
                "activation": {"model": len(inputs.tokens)},
                "compile_events": 0,
                "failure": None,
            }
            server._channel.send("ok", reply)
        return self.reference(batch, kv)
