"""Parts to start from: for each kind of slot a runnable part that computes what the reference does, from its own weights."""

from __future__ import annotations


def part_template(net: object, slot: str) -> str:
    raise NotImplementedError
