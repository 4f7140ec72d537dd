"""The model graph: what a configuration says about weights, caches and states, layer by layer. Counts only; no time, no sharding.

Everything a step costs is derived from three lists: the matrices that tokens go through, the attention that reads a cache, and
the state that a sequence carries. Norms, biases and rotary tables are left out (below 0.1 % of any model here).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What a matrix is for; decides how a plan shards it."""

    EMBED = "embed"
    HEAD = "head"
    QKV = "qkv"
    ATTENTION_OUT = "attention_out"
    LATENT_DOWN = "latent_down"
    """MLA's down projections: replicated under tensor parallelism."""
    LATENT_UP = "latent_up"
    INDEXER = "indexer"
    LINEAR_IN = "linear_in"
    LINEAR_OUT = "linear_out"
    GATE_UP = "gate_up"
    DOWN = "down"
    ROUTER = "router"
    EXPERT_GATE_UP = "expert_gate_up"
    EXPERT_DOWN = "expert_down"
    EXPERT_LATENT = "expert_latent"
    """Projections into and out of the experts' smaller space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A weight of k inputs and n outputs, in `copies` of which each token uses `active`."""

    name: str
    role: Role
    k: int
    n: int
    copies: int = 1
    active: float = 1.0
    """0 for the input embedding (a look-up), top-k for experts."""
    format: str = "bf16"

    @property
    def params(self) -> int:
        return self.k * self.n * self.copies

    @property
    def active_params(self) -> float:
        return self.k * self.n * self.active


class AttentionKind(StrEnum):
    GQA = "gqa"
    MLA = "mla"
    COMPRESSED = "compressed"
    """DeepSeek-V4: one latent entry a token, a sliding window plus every ratio-th compressed entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """What reads the cache in one layer."""

    kind: AttentionKind
    heads: int
    kv_heads: int
    """1 for MLA and compressed attention: one latent for all heads."""
    head_dim: int
    """Width of a key (of the latent with its rotary part for MLA)."""
    v_head_dim: int
    """Width of a value; 0 when the value is part of the key's entry (MLA, K = V)."""
    window: int | None = None
    """Tokens kept and read at most (sliding or chunked); None: all."""
    read_tokens: int | None = None
    """Sparse: entries read a query at most, of those kept; None: all kept."""
    compress_ratio: int = 1
    """Compressed: one entry for so many tokens beyond the window; 1: none but the window."""
    index_heads: int = 0
    index_dim: int = 0
    """Width of the indexer's key; 0: no indexer of its own in this layer."""
    index_bytes_per_token: float = 0.0
    norm_across_heads: bool = False
    """Queries and keys are normed over all heads at once (MiniMax-M2), so that tensor-parallel ranks sum their squares first."""

    def entry_bytes(self, kv_bytes: float) -> float:
        """Bytes of one cached token (or compressed entry) of this layer."""
        return self.kv_heads * (self.head_dim + self.v_head_dim) * kv_bytes

    def cache_bytes(self, context: int, kv_bytes: float = 2.0) -> float:
        """Bytes that one sequence of that context holds in this layer."""
        kept = context if self.window is None else min(context, self.window)
        held = kept * self.entry_bytes(kv_bytes) + context * self.index_bytes_per_token
        if self.kind is AttentionKind.COMPRESSED and self.compress_ratio > 1:
            held += context / self.compress_ratio * self.entry_bytes(kv_bytes)
        return held

    def read_bytes(self, context: int, kv_bytes: float = 2.0) -> float:
        """Bytes that one decode query reads in this layer."""
        if self.kind is AttentionKind.COMPRESSED:
            window = min(context, self.window or 0)
            beyond = context / self.compress_ratio if self.compress_ratio > 1 else 0.0
            chosen = min(beyond, self.read_tokens) if self.read_tokens is not None else beyond
            return (window + chosen) * self.entry_bytes(kv_bytes) + context * self.index_bytes_per_token
        kept = context if self.window is None else min(context, self.window)
        read = kept if self.read_tokens is None else min(kept, self.read_tokens)
        return read * self.entry_bytes(kv_bytes) + context * self.index_bytes_per_token


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One block of the model. Layers that are equal are held once, with their count in `ModelGraph.layers`."""

    kind: str
    """As `gqa+moe`, `gdn+moe`, `mamba2`: for reports and tables."""
    matrices: tuple[Matrix, ...]
    attention: Attention | None = None
    state_bytes: float = 0.0
    """Recurrent state of one sequence, bytes (fp32 states, bf16 convolution)."""
    top_k: int = 0
    num_experts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGraph:
    """A model as counts."""

    name: str
    family: str
    """`model_type` of the configuration."""
    hidden: int
    vocab: int
    max_context: int
    layers: tuple[tuple[int, Layer], ...]
    """(count, layer), in order of first appearance."""
    ends: tuple[Matrix, ...]
    """Embedding and head; a tied head is the embedding read once more, with no parameters of its own."""
    mtp_layers: int = 0
    """Draft layers for multi-token prediction; not part of any total here."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What was assumed where the configuration is silent."""

    @property
    def num_layers(self) -> int:
        return sum(count for count, _ in self.layers)

    @property
    def params(self) -> int:
        """All weights, each once."""
        inner = sum(count * matrix.params for count, layer in self.layers for matrix in layer.matrices)
        return inner + sum(matrix.params for matrix in self.ends if matrix.copies)

    @property
    def active_params(self) -> float:
        """Weights that one token goes through, head included, input embedding not."""
        inner = sum(count * matrix.active_params for count, layer in self.layers for matrix in layer.matrices)
        return inner + sum(matrix.active_params for matrix in self.ends)

    def weight_bytes(self) -> float:
        """In the shipped formats, scales included."""
        inner = sum(count * m.params * BYTES[m.format] for count, layer in self.layers for m in layer.matrices)
        return inner + sum(m.params * BYTES[m.format] for m in self.ends)

    def kv_bytes(self, context: int, kv_bytes: float = 2.0) -> float:
        """Cache and state of one sequence at that context."""
        return sum(
            count * ((layer.attention.cache_bytes(context, kv_bytes) if layer.attention else 0.0) + layer.state_bytes)
            for count, layer in self.layers
        )

    def kv_bytes_per_token(self, context: int, kv_bytes: float = 2.0) -> float:
        """Marginal bytes of one more token at that context (over the last 4,096 tokens, so that compression averages out)."""
        return (self.kv_bytes(context, kv_bytes) - self.kv_bytes(context - 4096, kv_bytes)) / 4096


BYTES: dict[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4 / (128 * 128),
    "int8": 1.0,
    "int4": 0.5 + 2 / 128,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "fp4": 0.5 + 1 / 32,
}
"""Bytes a weight, block scales included (fp8_block: one fp32 for 128 x 128; mxfp4: one byte for 32; nvfp4: one byte for 16)."""
