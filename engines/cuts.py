"""How deep the cuts of the fast tier are: so deep that what a candidate streams comes from memory, as the whole model's weights do."""

from __future__ import annotations

import math

from hotpass.records.deployment import ModelRef

CACHE_FACTOR = 3
"""A cut streams more than so many last-level caches: with less, its weights stay cached from one step to the next."""


def choose_cuts(model: ModelRef, llc_bytes: int, narrowest_bits: float) -> tuple[tuple[int, ...], ...]:
    """Cuts of the fast tier and, last, the whole model: (d1 layers, d2 layers, all), or (all,) alone.

    d1 is the least depth at which a candidate with weights of `narrowest_bits` streams more than three last-level caches; d2 is twice
    that, so that the difference of depths is as large as the first. Where d2 would be more than half of the model, the whole model is
    the fast tier: two cuts would take as long and say less.
    """
    whole = tuple(range(model.num_layers))
    head = model.vocab_size * model.hidden_size
    per_layer = max(1, (model.num_params - head) // max(1, model.num_layers))
    needed = CACHE_FACTOR * llc_bytes - head * narrowest_bits / 8
    shallow = max(1, math.floor(needed / (per_layer * narrowest_bits / 8)) + 1)
    deep = 2 * shallow
    if 2 * deep > model.num_layers:
        return (whole,)
    return (whole[:shallow], whole[:deep], whole)
