"""Building blocks: attention, linear attention, feed-forward and experts as matrices and caches.

Sources: the papers and reference implementations named at each function; widths always come from the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.graph.records import Attention, AttentionKind, Matrix, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """Weight format by place, from `quantization_config`."""

    attention: str = "bf16"
    dense: str = "bf16"
    shared: str = "bf16"
    experts: str = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """What mixes tokens in a layer."""

    kind: str
    matrices: tuple[Matrix, ...]
    attention: Attention | None = None
    state_bytes: float = 0.0


def gqa(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    window: int | None = None,
    gated: bool = False,
    shared_kv: bool = False,
    sparse_read: int | None = None,
    index_heads: int = 0,
    index_dim: int = 0,
    index_bytes: float = 0.0,
    norm_across_heads: bool = False,
    fmt: str = "bf16",
) -> Mixer:
    """Grouped-query attention (Ainslie et al. 2023); MHA and MQA are its ends. `gated`: an output gate of the queries' width
    (Qwen3.5); `shared_kv`: one projection serves as key and value (Gemma 4's full layers;
    both are cached, since only the key is normed and rotated); `sparse_read`: tokens read (MSA)."""
    value_dim = v_head_dim if v_head_dim is not None else head_dim
    query = heads * head_dim * (2 if gated else 1)
    key_value = kv_heads * head_dim + (0 if shared_kv else kv_heads * value_dim)
    matrices = [
        Matrix(name="qkv", role=Role.QKV, k=hidden, n=query + key_value, format=fmt),
        Matrix(name="o", role=Role.ATTENTION_OUT, k=heads * value_dim, n=hidden, format=fmt),
    ]
    if index_heads:
        matrices.append(Matrix(name="index", role=Role.INDEXER, k=hidden, n=(index_heads + 1) * index_dim, format=fmt))
    attention = Attention(
        kind=AttentionKind.GQA,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=value_dim,
        window=window,
        read_tokens=sparse_read,
        index_heads=index_heads,
        index_dim=index_dim,
        index_bytes_per_token=index_bytes,
        norm_across_heads=norm_across_heads,
    )
    return Mixer(kind="swa" if window else "gqa", matrices=tuple(matrices), attention=attention)


def mla(
    hidden: int,
    heads: int,
    *,
    q_rank: int | None,
    kv_rank: int,
    nope_dim: int,
    rope_dim: int,
    v_dim: int,
    gated: bool = False,
    index_heads: int = 0,
    index_dim: int = 0,
    own_indexer: bool = True,
    index_topk: int | None = None,
    fmt: str = "bf16",
) -> Mixer:
    """Multi-head latent attention (DeepSeek-V2, 2024), with DeepSeek sparse attention's lightning indexer (V3.2) where there is one:
    its key takes `index_dim` bytes of fp8 and one fp32 scale a token. `own_indexer` is False where a layer reuses another's choice."""
    q_in = q_rank or hidden
    down = (q_rank or 0) + kv_rank + rope_dim
    matrices = [
        Matrix(name="latent_down", role=Role.LATENT_DOWN, k=hidden, n=down, format=fmt),
        Matrix(name="q_up", role=Role.LATENT_UP, k=q_in, n=heads * (nope_dim + rope_dim), format=fmt),
        Matrix(name="kv_up", role=Role.LATENT_UP, k=kv_rank, n=heads * (nope_dim + v_dim), format=fmt),
        Matrix(name="o", role=Role.ATTENTION_OUT, k=heads * v_dim, n=hidden, format=fmt),
    ]
    if gated:
        matrices.append(Matrix(name="gate", role=Role.LATENT_UP, k=hidden, n=heads * v_dim, format=fmt))
    has_index = bool(index_heads) and own_indexer
    if has_index:
        matrices += [
            Matrix(name="index_q", role=Role.INDEXER, k=q_in, n=index_heads * index_dim, format=fmt),
            Matrix(name="index_k", role=Role.INDEXER, k=hidden, n=index_dim + index_heads, format=fmt),
        ]
    attention = Attention(
        kind=AttentionKind.MLA,
        heads=heads,
        kv_heads=1,
        head_dim=kv_rank + rope_dim,
        v_head_dim=0,
        read_tokens=index_topk if index_heads else None,
        index_heads=index_heads if has_index else 0,
        index_dim=index_dim if has_index else 0,
        index_bytes_per_token=index_dim + 4 if has_index else 0.0,
    )
    return Mixer(kind="mla+dsa" if index_heads else "mla", matrices=tuple(matrices), attention=attention)


def compressed(
    hidden: int,
    heads: int,
    head_dim: int,
    *,
    q_rank: int,
    o_groups: int,
    o_rank: int,
    window: int,
    ratio: int,
    index_heads: int,
    index_dim: int,
    index_topk: int,
    fmt: str = "bf16",
) -> Mixer:
    """DeepSeek-V4's attention: one 512-wide entry a token within a window, and one for `ratio` tokens beyond it. Ratio 4 (CSA) chooses
    entries by an fp4 indexer (half a byte a dimension, 4 bytes of scales) and compresses overlapping windows; ratio 128 (HCA) reads
    all. The compressor keeps fp32 keys and gates of the entries being made; the output goes through `o_groups` low-rank projections."""
    overlap = 2 if ratio == 4 else 1
    matrices = [
        Matrix(name="latent_down", role=Role.LATENT_DOWN, k=hidden, n=q_rank + head_dim, format=fmt),
        Matrix(name="q_up", role=Role.LATENT_UP, k=q_rank, n=heads * head_dim, format=fmt),
        Matrix(name="o_down", role=Role.ATTENTION_OUT, k=heads * head_dim // o_groups, n=o_groups * o_rank, format=fmt),
        Matrix(name="o_up", role=Role.ATTENTION_OUT, k=o_groups * o_rank, n=hidden, format=fmt),
    ]
    index_bytes = 0.0
    state = 0.0
    if ratio:
        matrices.append(
            Matrix(name="compress", role=Role.LATENT_DOWN, k=hidden, n=2 * overlap * head_dim, format="bf16")
        )
        state = 2.0 * ratio * overlap * head_dim * 4
    if ratio == 4:
        matrices += [
            Matrix(name="index_q", role=Role.INDEXER, k=q_rank, n=index_heads * index_dim, format=fmt),
            Matrix(name="index_k", role=Role.INDEXER, k=hidden, n=2 * overlap * index_dim + index_heads, format="bf16"),
        ]
        index_bytes = (index_dim / 2 + 4) / ratio
    attention = Attention(
        kind=AttentionKind.COMPRESSED,
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        v_head_dim=0,
        window=window,
        read_tokens=index_topk if ratio == 4 else None,
        compress_ratio=ratio or 1,
        index_heads=index_heads if ratio == 4 else 0,
        index_dim=index_dim if ratio == 4 else 0,
        index_bytes_per_token=index_bytes,
    )
    kind = {0: "swa", 4: "csa"}.get(ratio, "hca")
    return Mixer(kind=kind, matrices=tuple(matrices), attention=attention, state_bytes=state)


def gated_delta(
    hidden: int, key_heads: int, key_dim: int, value_heads: int, value_dim: int, conv: int, fmt: str = "bf16"
) -> Mixer:
    """Gated DeltaNet (Yang et al. 2024, as in Qwen3.5): an fp32 state of key x value for each value head, a short convolution."""
    keys, values = key_heads * key_dim, value_heads * value_dim
    matrices = (
        Matrix(name="qkvz_ba", role=Role.LINEAR_IN, k=hidden, n=2 * keys + 2 * values + 2 * value_heads, format=fmt),
        Matrix(name="out", role=Role.LINEAR_OUT, k=values, n=hidden, format=fmt),
    )
    state = value_heads * key_dim * value_dim * 4.0 + (2 * keys + values) * (conv - 1) * 2.0
    return Mixer(kind="gdn", matrices=matrices, state_bytes=state)


def kimi_delta(hidden: int, heads: int, head_dim: int, conv: int, full_rank_gate: bool, fmt: str = "bf16") -> Mixer:
    """Kimi delta attention (Kimi Linear, 2025): per-channel decay through a low-rank projection, fp32 state, short convolutions."""
    width = heads * head_dim
    gate = (
        [Matrix(name="gate", role=Role.LINEAR_IN, k=hidden, n=width, format=fmt)]
        if full_rank_gate
        else [
            Matrix(name="gate_down", role=Role.LINEAR_IN, k=hidden, n=head_dim, format=fmt),
            Matrix(name="gate_up", role=Role.LINEAR_IN, k=head_dim, n=width, format=fmt),
        ]
    )
    matrices = (
        Matrix(name="qkv", role=Role.LINEAR_IN, k=hidden, n=3 * width + heads, format=fmt),
        Matrix(name="decay_down", role=Role.LINEAR_IN, k=hidden, n=head_dim, format=fmt),
        Matrix(name="decay_up", role=Role.LINEAR_IN, k=head_dim, n=width, format=fmt),
        *gate,
        Matrix(name="out", role=Role.LINEAR_OUT, k=width, n=hidden, format=fmt),
    )
    state = heads * head_dim * head_dim * 4.0 + 3 * width * (conv - 1) * 2.0
    return Mixer(kind="kda", matrices=matrices, state_bytes=state)


def mamba2(hidden: int, heads: int, head_dim: int, groups: int, state_dim: int, conv: int, fmt: str = "bf16") -> Mixer:
    """Mamba-2 (Dao & Gu 2024): an fp32 state of head_dim x state_dim for each head, a short convolution over x, B and C."""
    inner = heads * head_dim
    mixed = inner + 2 * groups * state_dim
    matrices = (
        Matrix(name="in", role=Role.LINEAR_IN, k=hidden, n=inner + mixed + heads, format=fmt),
        Matrix(name="out", role=Role.LINEAR_OUT, k=inner, n=hidden, format=fmt),
    )
    return Mixer(kind="mamba2", matrices=matrices, state_bytes=inner * state_dim * 4.0 + mixed * (conv - 1) * 2.0)


def dense_ffn(hidden: int, width: int, *, gated: bool = True, fmt: str = "bf16") -> tuple[Matrix, ...]:
    """SwiGLU and its kin (gated), or two plain matrices."""
    return (
        Matrix(name="gate_up", role=Role.GATE_UP, k=hidden, n=width * (2 if gated else 1), format=fmt),
        Matrix(name="down", role=Role.DOWN, k=width, n=hidden, format=fmt),
    )


def experts(
    hidden: int,
    *,
    num_experts: int,
    top_k: int,
    width: int,
    shared_width: int = 0,
    latent: int = 0,
    gated: bool = True,
    formats: Formats,
) -> tuple[Matrix, ...]:
    """Routed experts, the shared expert beside them (its whole width), and the projections of a latent space where there is one."""
    inner, factor = latent or hidden, 2 if gated else 1
    matrices = [
        Matrix(name="router", role=Role.ROUTER, k=hidden, n=num_experts),
        Matrix(
            name="expert_gate_up", role=Role.EXPERT_GATE_UP, k=inner, n=factor * width, copies=num_experts, active=top_k,
            format=formats.experts,
        ),
        Matrix(
            name="expert_down", role=Role.EXPERT_DOWN, k=width, n=inner, copies=num_experts, active=top_k,
            format=formats.experts,
        ),
    ]  # fmt: skip
    if latent:
        matrices += [
            Matrix(name="latent_in", role=Role.EXPERT_LATENT, k=hidden, n=latent, format=formats.dense),
            Matrix(name="latent_out", role=Role.EXPERT_LATENT, k=latent, n=hidden, format=formats.dense),
        ]
    if shared_width:
        matrices += [
            Matrix(name="shared_gate_up", role=Role.GATE_UP, k=hidden, n=factor * shared_width, format=formats.shared),
            Matrix(name="shared_down", role=Role.DOWN, k=shared_width, n=hidden, format=formats.shared),
        ]
    return tuple(matrices)
