"""Weights by the names of vLLM's tree: what it merges is merged, from the checkpoint's own values.

    q_proj, k_proj, v_proj ──cat──► qkv_proj        gate_proj, up_proj ──cat──► gate_up_proj

A linear layer of vLLM on a CPU packs its weight at load and leaves `.weight` empty, so a part can only have it from here. The
merged names stand beside the checkpoint's own. torch only, no vLLM: builders run this in the project's environment.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engines.prepare.store import WeightStore

MERGED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Module of vLLM's Llama family → modules of the checkpoint, in the order of their rows (vLLM's `packed_modules_mapping`)."""

WHOLE = "model"


def vllm_weights(store: WeightStore, slot: str) -> WeightStore:
    """What a part's `weights` gets at a slot of vLLM: names relative to it (in full for `model`), merged ones among them."""
    if slot == WHOLE:
        return WeightStore({**store, **_merged(store)})
    parent, _, module = slot.rpartition(".")
    if module in MERGED:
        beside = store.restricted(parent)
        return WeightStore({**_merged(beside)}).restricted(module)
    own = store.restricted(slot)
    return WeightStore({**own, **_merged(own)})


def vllm_module_names(store: WeightStore) -> tuple[str, ...]:
    """`model` and every module path below which vLLM has weights, in the order of the file."""
    names = {WHOLE: None}
    for parameter in _renamed(store):
        components = parameter.split(".")
        for depth in range(1, len(components)):
            names[".".join(components[:depth])] = None
    return tuple(names)


def _renamed(store: WeightStore) -> list[str]:
    parents = {module: merged for merged, modules in MERGED.items() for module in modules}
    found: dict[str, None] = {}
    for parameter in store:
        *path, last = parameter.split(".")
        if path:
            path[-1] = parents.get(path[-1], path[-1])
        found[".".join([*path, last])] = None
    return list(found)


def _merged(store: WeightStore) -> dict[str, torch.Tensor]:
    """Merged tensors of every module in the store that has all of its pieces."""
    made: dict[str, torch.Tensor] = {}
    for merged, modules in MERGED.items():
        first = modules[0]
        for name in store:
            *path, kind = name.split(".")
            if not path or path[-1] != first:
                continue
            pieces = [".".join([*path[:-1], module, kind]) for module in modules]
            if all(piece in store for piece in pieces):
                made[".".join([*path[:-1], merged, kind])] = torch.cat([store[piece] for piece in pieces])
    return made
