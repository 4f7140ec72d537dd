"""Declares a domain that no step lies in, so that the incumbent is what is measured.

Rejected: invalid: never ran
"""

from hotpass import part


@part(engine="decoder", claims=["model"], domain="num_seqs > 1000")
class NeverRuns:
    """At least as fast as what was there."""

    def forward(self, batch, kv):
        raise AssertionError("never called")
