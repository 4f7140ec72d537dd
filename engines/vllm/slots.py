"""The slot table of vLLM's tree, and parts to start from: for each kind of slot one that computes what vLLM does there.

Kinds that are written out are those that most of vLLM's language models share: norm, gate, linear layers, the gated MLP. Any other
slot gets a part that calls the reference, with the reference's source below it. `model` is the base model: logits are made outside.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from engines.starting import OWN_NORM, OWN_WEIGHTS, REFERENCE, starting_part, with_reference
from hotpass.canonical import bytes_hash
from hotpass.records.measurement import Tier
from hotpass.records.slots import Slot, SlotTable

NO_SLOT = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential, torch.nn.Dropout)

_NORM = """
    def forward(self, x, residual=None):
        wide = x.float() if residual is None else x.float() + residual.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        out = (normed.to(x.dtype) * self.w["weight"]).to(x.dtype)
        return out if residual is None else (out, wide.to(x.dtype))
"""

_GATE = """
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
"""

_LINEAR = """
    def forward(self, input_):
        return F.linear(input_, self.w["weight"], self.w.get("bias")), None
"""

_MLP = """
    def forward(self, x):
        gate, up = F.linear(x, self.w["gate_up_proj.weight"], self.w.get("gate_up_proj.bias")).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w["down_proj.weight"], self.w.get("down_proj.bias"))
"""

_LINEARS = ("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear")
"""Of one rank all the same product."""


def slot_modules(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Slot → module, in tree order."""
    return {name: module for name, module in root.named_modules() if name and not isinstance(module, NO_SLOT)}


def slot_table(root: torch.nn.Module, version: str) -> SlotTable:
    """All slots. The fast tier can judge each: it runs the whole model."""
    slots = []
    for name, module in slot_modules(root).items():
        kind: Any = type(module)
        signature, digest = _described(kind)
        slots.append(
            Slot(
                name=name,
                stands_for=kind.__name__,
                signature=signature,
                reference_sha256=digest,
                lowest_tier=Tier.FAST,
            )
        )
    return SlotTable(engine="vllm", version=f"vllm/1 {version} {type(root).__name__}", slots=tuple(slots))


def part_template(slot: str, module: torch.nn.Module, config: Any) -> str:
    """Text of `part.py` for a slot, claiming it in every layer."""
    kind: Any = type(module)
    body = _body(kind.__name__, module, config)
    text = starting_part(slot, body, engine="vllm", stands_for=kind.__name__)
    return with_reference(text, _source(kind), _described(kind)[0]) if body is REFERENCE else text


def _body(stands_for: str, module: torch.nn.Module, config: Any) -> str:
    """Methods of the part, of the kind that the slot is."""
    if stands_for == "RMSNorm" and hasattr(config, "rms_norm_eps") and getattr(module, "has_weight", False):
        return OWN_NORM + _NORM
    if stands_for == "SiluAndMul":
        return _GATE
    if stands_for in _LINEARS and getattr(module, "return_bias", False) and not getattr(module, "skip_bias_add", True):
        return OWN_WEIGHTS + _LINEAR
    gated = {name: type(child).__name__ for name, child in module.named_children()}
    if gated == {"gate_up_proj": _LINEARS[1], "down_proj": _LINEARS[3], "act_fn": "SiluAndMul"}:
        return OWN_WEIGHTS + _MLP
    return REFERENCE


@cache
def _described(kind: Any) -> tuple[str, str]:
    """Signature of a class's forward, and the hash of its source. vLLM's custom operators hand on to another method, whose
    signature says what they take."""
    signature = inspect.signature(kind.forward)
    given = {name: item for name, item in signature.parameters.items() if name != "self"}
    if {item.kind for item in given.values()} <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        native = getattr(kind, "forward_native", kind.forward)
        signature = inspect.signature(native)
    own = signature.replace(parameters=[p for name, p in signature.parameters.items() if name != "self"])
    return str(own), bytes_hash(_source(kind).encode())


@cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"# {kind.__module__}.{kind.__qualname__} has no Python source\n"
