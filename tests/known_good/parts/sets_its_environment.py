"""Sets a variable for a library while it is installed, and takes it back."""

import os

from hotpass import part


@part(engine="decoder", claims=["model"])
class SetsItsEnvironment:
    """Some libraries are configured in no other way."""

    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        os.environ["PLANTED_LIBRARY_MODE"] = "fast"

    def forward(self, batch, kv):
        return self.reference(batch, kv)

    def close(self):
        os.environ.pop("PLANTED_LIBRARY_MODE", None)  # there is an instance for each cut
