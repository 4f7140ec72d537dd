"""The candidates of `make bench-experiments`: forty proposals, always the same, good and bad as a search makes them.

Parts of the catalogue with their parameters, settings, compositions; and planted ones: wrong outputs, code that does not build, a
crash, and proposals that were made before. Also the counterparts for vLLM's tree that the cold arm is sampled with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartSource, PartUse, Value
from hotpass.settings import numerics_of_settings
from search.catalogue import find_part

Params = Mapping[str, Value]

PARTS: tuple[tuple[tuple[str, Params], ...], ...] = (
    (("cpp-model", {"weights_as": "gguf"}),),
    (("cpp-model", {"weights_as": "fp32"}),),
    (("cpp-model", {"weights_as": "gguf-a8"}),),
    (("cpp-model", {"weights_as": "int8"}),),
    (("cpp-model", {"weights_as": "int8-a8"}),),
    (("cpp-model", {"weights_as": "bf16"}),),
    (("lean-model", {"storage": "loaded"}),),
    (("lean-model", {"storage": "bfloat16"}),),
    (("lean-prepacked", {"storage": "float32"}),),
    (("lean-prepacked", {"storage": "float16"}),),
    (("lean-prepacked", {"storage": "int8"}),),
    (("fused-gate-up", {}),),
    (("fused-qkv", {"attention": "sdpa"}),),
    (("fused-qkv", {"attention": "bmm"}),),
    (("attention-bmm", {}),),
    (("attention-sdpa-grouped", {}),),
    (("attention-split", {"pieces": 2}),),
    (("attention-split", {"pieces": 4}),),
    (("norm-fused", {}),),
    (("prepacked-head", {"storage": "float32"}),),
    (("prepacked-head", {"storage": "int8"}),),
    (("prepacked-linear", {"storage": "float32"}),),
    (("prepacked-linear", {"storage": "int8"}),),
    (("bf16-linear", {}),),
    (("cpp-attention", {}),),
    (("cpp-linear", {}),),
    (("fused-gate-up", {}), ("norm-fused", {})),
    (("cpp-attention", {}), ("fused-gate-up", {})),
    (("norm-fused", {}), ("prepacked-head", {"storage": "float32"})),
    (("attention-bmm", {}), ("fused-gate-up", {})),
)
"""Thirty of parts alone."""

SETTINGS: tuple[Mapping[str, Value], ...] = ({"threads": 1}, {"chunk_tokens": 256})
"""Two of settings alone; the second changes nothing in a window."""

_MLP = """
import ctypes
from hotpass import part

@part(engine="{engine}", claims=["model.layers.*.mlp"]{more})
class Planted:
    {extra}
    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, x):
        {body}
"""

PLANTED: tuple[tuple[str, dict[str, str]], ...] = (
    ("wrong-scale", {"body": "return self.reference(x) * 1.02"}),
    ("wrong-sign", {"body": "return -self.reference(x)"}),
    ("wrong-nan", {"body": "return self.reference(x) / (x.sum() * 0)"}),
    ("build-weights", {"extra": "def weights(self, w, params): raise ValueError('planted')", "body": "return x"}),
    ("build-syntax", {"body": "return self.reference(x)", "more": ', native={"lib": "lib.cpp"}'}),
    ("crash", {"body": "return ctypes.string_at(0)"}),
)
"""Three wrong, two that do not build, one that ends its process."""

DUPLICATES = (0, 11)
"""Places in the list that are proposed a second time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposed:
    """One entry of the list."""

    name: str
    candidate: Candidate
    against: Candidate = AS_LOADED
    """The incumbent that it was, or is to be, held against."""


def forty(dtype: str) -> list[Proposed]:
    """All of them, in an order that mixes kinds: every seventh place of the list, again and again."""
    made = [of_parts(parts, dtype) for parts in PARTS]
    made += [of_settings(settings, dtype) for settings in SETTINGS]
    made += [planted(name, "decoder", **text) for name, text in PLANTED]
    made += [made[place] for place in DUPLICATES]
    return [made[place] for start in range(7) for place in range(start, len(made), 7)]


def of_parts(parts: tuple[tuple[str, Params], ...], dtype: str) -> Proposed:
    """Catalogue parts, their class worked out as a campaign does."""
    uses, kinds = [], []
    for name, params in parts:
        source = find_part(name)
        declared = declaration(source)
        use = declared.bind(source, params)
        uses.append(use)
        kinds.append(declared.numerics_of(use.params, dtype))
    candidate = Candidate(parts=tuple(uses), numerics=max(kinds, key=lambda kind: kind.rank))
    return Proposed(name=candidate.label, candidate=candidate)


def of_settings(settings: Mapping[str, Value], dtype: str) -> Proposed:
    candidate = Candidate(settings=settings, numerics=numerics_of_settings(settings, dtype))
    return Proposed(name=candidate.label, candidate=candidate)


def planted(name: str, engine: str, *, body: str, extra: str = "", more: str = "") -> Proposed:
    """A small part at every MLP."""
    files = [("part.py", _MLP.format(engine=engine, body=body, extra=extra, more=more))]
    if "lib.cpp" in more:
        files.append(("lib.cpp", "int broken( {"))
    source = PartSource(name=name, files=tuple(files))
    return Proposed(name=name, candidate=Candidate(parts=(PartUse(source=source),), numerics=Numerics.TOLERANCE))


VLLM_MLP = """
import torch
from hotpass import part

@part(engine="vllm", claims=["model.layers.*.mlp"], replaces="LlamaMLP", reload="reweight"{domain})
class PlainMlp:
    def weights(self, w, params):
        return {{"both": w["gate_up_proj.weight"].clone(), "down": w["down_proj.weight"].clone()}}

    def prepare(self, ctx, params):
        self.both, self.down = ctx.weights["both"], ctx.weights["down"]

    def forward(self, x):
        gate, up = torch.nn.functional.linear(x, self.both).chunk(2, dim=-1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, self.down)
"""
VLLM_NORM = """
import torch
from hotpass import part

@part(engine="vllm", claims=["model.layers.*.post_attention_layernorm"], reload="reweight")
class PlainNorm:
    def weights(self, w, params):
        return {"weight": w["weight"].clone()}

    def prepare(self, ctx, params):
        self.weight, self.eps = ctx.weights["weight"], ctx.config.rms_norm_eps

    def forward(self, x, residual):
        total = x + residual
        return torch.nn.functional.rms_norm(total, (total.shape[-1],), self.weight, self.eps), total
"""


def for_vllm() -> list[Proposed]:
    """Counterparts of the list for vLLM's tree: an MLP in torch, the same for decoding only, a norm, and a wrong one."""
    texts = {
        "vllm-mlp": VLLM_MLP.format(domain=""),
        "vllm-norm": VLLM_NORM,
        "vllm-mlp-decode": VLLM_MLP.format(domain=", domain=\"phase == 'decode'\""),
    }
    found = []
    for name, text in texts.items():
        use = PartUse(source=PartSource(name=name, files=(("part.py", text),)))
        found.append(Proposed(name=name, candidate=Candidate(parts=(use,), numerics=Numerics.TOLERANCE)))
    return found
