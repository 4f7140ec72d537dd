"""Honest candidates for benchmarks of the engine itself: copies under ids of their own, and copies that are slower by a known factor.

A copy calls the reference; its number is a comment, so that every number is another candidate. A slow copy then waits, busy, until its
step has taken `factor` times as long: the slowdown is exact whatever the machine does, and nothing about the outputs changes. Over an
incumbent that is a slow copy, a plain one is the planted speedup.
"""

from __future__ import annotations

from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, Numerics, PartSource

COPY = """\
# copy {number}
import time

from hotpass import part


@part(engine="decoder", claims=["model"], numerics="tolerance")
class Copy:
    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, batch, kv):
        start = time.perf_counter()
        logits = self.reference(batch, kv)
        end = start + {factor} * (time.perf_counter() - start)
        while time.perf_counter() < end:
            pass
        return logits
"""

FAULT = """\
import os

from hotpass import part


@part(engine="decoder", claims=["model"], numerics="tolerance")
class Faulty:
    def prepare(self, ctx, params):
        self.steps, self.reference = 0, ctx.reference()

    def forward(self, batch, kv):
        self.steps += 1
        while self.steps > {after}:
            {fault}
        return self.reference(batch, kv)
"""


def copy(number: int, factor: float = 1.0) -> Candidate:
    """As loaded under another id, each step `factor` times as long."""
    return _candidate("copy", COPY.format(number=number, factor=factor))


def crashing(after: int) -> Candidate:
    """Ends its process in the step after so many."""
    return _candidate("crash", FAULT.format(after=after, fault="os._exit(1)"))


def hanging(after: int) -> Candidate:
    """Never comes back from the step after so many."""
    return _candidate("hang", FAULT.format(after=after, fault="pass"))


def _candidate(name: str, text: str) -> Candidate:
    source = PartSource(name=name, files=(("part.py", text),))
    return Candidate(parts=(declaration(source).bind(source, {}),), numerics=Numerics.TOLERANCE)
