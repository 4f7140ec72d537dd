"""From a Hugging Face configuration to a model graph, family by family. An unknown family is refused by name, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from costmodel.graph.blocks import (
    Formats,
    Mixer,
    compressed,
    dense_ffn,
    experts,
    gated_delta,
    gqa,
    kimi_delta,
    mamba2,
    mla,
)
from costmodel.graph.records import Layer, Matrix, ModelGraph, Role
from hotpass.errors import InputError, nearest

Config = Mapping[str, Any]


def graph_of(config: Config, name: str = "model") -> ModelGraph:
    """The graph of a parsed config.json. Raises InputError for an unknown family or a field that is missing or contradicts another."""
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else dict(config)
    family = str(text.get("model_type") or config.get("model_type") or "")
    if family not in FAMILIES:
        raise InputError(
            "model_type",
            family or "(missing)",
            "is not an architecture that the cost model knows",
            nearest(family, sorted(FAMILIES)),
        )
    reader = Reader(text, name)
    layers = FAMILIES[family](reader)
    if len(layers) != reader.count("num_hidden_layers", default=len(layers)):
        raise InputError(
            f"{name}: num_hidden_layers",
            text["num_hidden_layers"],
            f"contradicts the {len(layers)} layers that are listed one by one",
            "correct the configuration",
        )
    hidden, vocab = reader.count("hidden_size"), reader.count("vocab_size")
    tied = bool(text.get("tie_word_embeddings", family in TIED_BY_DEFAULT))
    return ModelGraph(
        name=name,
        family=family,
        hidden=hidden,
        vocab=vocab,
        max_context=reader.count("max_position_embeddings"),
        layers=_counted(layers),
        ends=(
            Matrix(name="embed", role=Role.EMBED, k=vocab, n=hidden, active=0.0),
            Matrix(name="head", role=Role.HEAD, k=hidden, n=vocab, copies=0 if tied else 1),
        ),
        mtp_layers=int(text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0),
    )


class Reader:
    """Reads fields, and refuses by name what is missing or impossible."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is set, as a positive whole number."""
        for field in names:
            value = self.config.get(field)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                    raise InputError(
                        f"{self.name}: {field}", value, "is not a positive whole number", "correct the configuration"
                    )
                return value
        if default is None:
            raise InputError(f"{self.name}: {names[0]}", "(missing)", "is needed", "give the model's own config.json")
        return default

    def get(self, field: str, default: Any = None) -> Any:
        value = self.config.get(field)
        return default if value is None else value

    @property
    def hidden(self) -> int:
        return self.count("hidden_size")

    @property
    def heads(self) -> int:
        return self.count("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        found = self.count("num_key_value_heads", default=self.heads)
        if self.heads % found:
            raise InputError(
                f"{self.name}: num_key_value_heads",
                found,
                f"does not divide the {self.heads} query heads",
                "correct the configuration",
            )
        return found

    @property
    def head_dim(self) -> int:
        return self.count("head_dim", default=self.hidden // self.heads)

    @property
    def num_layers(self) -> int:
        return self.count("num_hidden_layers")

    @property
    def formats(self) -> Formats:
        """Weight formats as shipped."""
        quant = self.get("quantization_config", {})
        method = str(quant.get("quant_method", ""))
        if method == "fp8":
            block = "fp8_block" if quant.get("weight_block_size") else "fp8"
            routed = "fp4" if self.get("expert_dtype") == "fp4" else block
            return Formats(attention=block, dense=block, shared=block, experts=routed)
        if method == "mxfp4" or "mxfp4" in str(quant.get("format", "")):
            return Formats(experts="mxfp4")
        if method in ("modelopt", "nvfp4") or "NVFP4" in str(quant.get("quant_algo", "")):
            return Formats(dense="nvfp4", shared="nvfp4", experts="nvfp4")
        if method in ("", "none"):
            return Formats()
        raise InputError(
            f"{self.name}: quant_method",
            method,
            "is not a format that the cost model knows",
            "known: fp8, mxfp4, modelopt",
        )

    def plain_gqa(self, **changes: Any) -> Mixer:
        return gqa(self.hidden, self.heads, self.kv_heads, self.head_dim, fmt=self.formats.attention, **changes)

    def dense(self, width: int | None = None) -> tuple[Matrix, ...]:
        return dense_ffn(self.hidden, width or self.count("intermediate_size"), fmt=self.formats.dense)

    def routed(self, *, width: int, shared_width: int = 0, gated: bool = True, latent: int = 0) -> tuple[Matrix, ...]:
        return experts(
            self.hidden,
            num_experts=self.count("n_routed_experts", "num_experts", "num_local_experts"),
            top_k=self.count("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
            width=width,
            shared_width=shared_width,
            latent=latent,
            gated=gated,
            formats=self.formats,
        )


def _layer(mixer: Mixer | None, ffn: Sequence[Matrix]) -> Layer:
    routed = [matrix for matrix in ffn if matrix.role is Role.EXPERT_DOWN]
    kinds = [mixer.kind] if mixer else []
    kinds += ["moe" if routed else "dense"] if ffn else []
    return Layer(
        kind="+".join(kinds),
        matrices=(*(mixer.matrices if mixer else ()), *ffn),
        attention=mixer.attention if mixer else None,
        state_bytes=mixer.state_bytes if mixer else 0.0,
        top_k=int(routed[0].active) if routed else 0,
        num_experts=routed[0].copies if routed else 0,
    )


def _counted(layers: Sequence[Layer]) -> tuple[tuple[int, Layer], ...]:
    counts: dict[Layer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return tuple((count, layer) for layer, count in counts.items())


def _dense_family(r: Reader) -> list[Layer]:
    window = r.get("sliding_window") if r.get("use_sliding_window", r.config.get("model_type") == "mistral") else None
    return [_layer(r.plain_gqa(window=window), r.dense())] * r.num_layers


def _moe_family(r: Reader) -> list[Layer]:
    """Every layer routed, but for `first_k_dense_replace` and `mlp_only_layers` (Mixtral, Qwen3-MoE, GLM-4, MiniMax-M2)."""
    width = r.count("moe_intermediate_size", "intermediate_size")
    shared = (
        r.count("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim", default=0)
        if _has_shared(r)
        else 0
    )
    shared = shared or int(r.get("n_shared_experts", 0)) * width
    routed = r.routed(width=width, shared_width=shared)
    dense_layers = set(range(int(r.get("first_k_dense_replace", 0)))) | set(r.get("mlp_only_layers", ()))
    mixer = r.plain_gqa(norm_across_heads=r.get("qk_norm_type") == "per_layer")
    return [_layer(mixer, r.dense() if i in dense_layers else routed) for i in range(r.num_layers)]


def _has_shared(r: Reader) -> bool:
    return any(
        r.get(field) for field in ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
    )


def _deepseek(r: Reader) -> list[Layer]:
    """MLA, with the indexer of sparse attention where the configuration has one (DeepSeek V3, V3.2, Kimi K2, GLM-5)."""
    width = r.count("moe_intermediate_size")
    routed = r.routed(width=width, shared_width=int(r.get("n_shared_experts", 0)) * width)
    types = r.get("indexer_types") or ["full"] * r.num_layers
    dense_first = int(r.get("first_k_dense_replace", 0))
    return [
        _layer(
            mla(
                r.hidden,
                r.heads,
                q_rank=r.get("q_lora_rank"),
                kv_rank=r.count("kv_lora_rank"),
                nope_dim=r.count("qk_nope_head_dim"),
                rope_dim=r.count("qk_rope_head_dim"),
                v_dim=r.count("v_head_dim"),
                index_heads=int(r.get("index_n_heads", 0)),
                index_dim=int(r.get("index_head_dim", 0)),
                index_topk=r.get("index_topk"),
                own_indexer=types[index] == "full",
                fmt=r.formats.attention,
            ),
            r.dense() if index < dense_first else routed,
        )
        for index in range(r.num_layers)
    ]


def _deepseek_v4(r: Reader) -> list[Layer]:
    width = r.count("moe_intermediate_size")
    routed = r.routed(width=width, shared_width=int(r.get("n_shared_experts", 0)) * width)
    ratios = list(r.get("compress_ratios"))[: r.num_layers]
    return [
        _layer(
            compressed(
                r.hidden,
                r.heads,
                r.head_dim,
                q_rank=r.count("q_lora_rank"),
                o_groups=r.count("o_groups"),
                o_rank=r.count("o_lora_rank"),
                window=r.count("sliding_window"),
                ratio=ratio,
                index_heads=r.count("index_n_heads"),
                index_dim=r.count("index_head_dim"),
                index_topk=r.count("index_topk"),
                fmt=r.formats.attention,
            ),
            routed,
        )
        for ratio in ratios
    ]


def _kimi_linear(r: Reader) -> list[Layer]:
    linear = r.get("linear_attn_config")
    width = r.count("moe_intermediate_size")
    full = mla(
        r.hidden,
        r.heads,
        q_rank=r.get("q_lora_rank"),
        kv_rank=r.count("kv_lora_rank"),
        nope_dim=r.count("qk_nope_head_dim"),
        rope_dim=r.count("qk_rope_head_dim"),
        v_dim=r.count("v_head_dim"),
        gated=bool(r.get("mla_use_output_gate", False)),
    )
    delta = kimi_delta(
        r.hidden,
        linear["num_heads"],
        linear["head_dim"],
        linear["short_conv_kernel_size"],
        bool(linear.get("use_full_rank_gate")),
    )
    routed = r.routed(
        width=width,
        shared_width=int(r.get("num_shared_experts", 0)) * width,
        latent=int(r.get("routed_expert_hidden_size", 0)),
    )
    full_layers = {index - 1 for index in linear["full_attn_layers"]}
    dense_first = int(r.get("first_k_dense_replace", 0))
    return [
        _layer(full if index in full_layers else delta, r.dense() if index < dense_first else routed)
        for index in range(r.num_layers)
    ]


def _qwen_hybrid(r: Reader) -> list[Layer]:
    """Gated DeltaNet with a full, output-gated layer now and then (Qwen3-Next, Qwen3.5), dense or routed."""
    linear = gated_delta(
        r.hidden,
        r.count("linear_num_key_heads"),
        r.count("linear_key_head_dim"),
        r.count("linear_num_value_heads"),
        r.count("linear_value_head_dim"),
        r.count("linear_conv_kernel_dim"),
        fmt=r.formats.attention,
    )
    full = r.plain_gqa(gated=bool(r.get("attn_output_gate", True)))
    routed = r.get("num_experts") or r.get("n_routed_experts")
    ffn = (
        r.routed(width=r.count("moe_intermediate_size"), shared_width=int(r.get("shared_expert_intermediate_size", 0)))
        if routed
        else r.dense()
    )
    return [_layer(full if kind == "full_attention" else linear, ffn) for kind in _layer_types(r, "linear_attention")]


def _layer_types(r: Reader, other: str) -> list[str]:
    listed = r.get("layer_types")
    if listed:
        return list(listed)
    every = r.count("full_attention_interval")
    return ["full_attention" if (index + 1) % every == 0 else other for index in range(r.num_layers)]


def _gpt_oss(r: Reader) -> list[Layer]:
    routed = r.routed(width=r.count("intermediate_size"))
    window = r.count("sliding_window")
    return [
        _layer(r.plain_gqa(window=window if kind == "sliding_attention" else None), routed)
        for kind in _layer_types(r, "")
    ]


def _gemma4(r: Reader) -> list[Layer]:
    """Sliding layers; full layers with wider heads and K = V; a dense MLP beside the experts of each layer."""
    sliding = r.plain_gqa(window=r.count("sliding_window"))
    full = gqa(
        r.hidden,
        r.heads,
        r.count("num_global_key_value_heads", default=r.kv_heads),
        r.count("global_head_dim", default=r.head_dim),
        shared_kv=bool(r.get("attention_k_eq_v", False)),
    )
    ffn: tuple[Matrix, ...] = r.dense()
    if r.get("enable_moe_block", False):
        ffn = (*ffn, *r.routed(width=r.count("moe_intermediate_size")))
    return [_layer(full if kind == "full_attention" else sliding, ffn) for kind in _layer_types(r, "sliding_attention")]


def _llama4(r: Reader) -> list[Layer]:
    """Chunked attention on three of four layers; routed layers at the given step, with one shared expert of the experts' width."""
    width = r.count("intermediate_size")
    routed = r.routed(width=width, shared_width=width)
    dense = r.dense(r.count("intermediate_size_mlp"))
    step = r.count("interleave_moe_layer_step", default=1)
    chunk = r.get("attention_chunk_size")
    return [
        _layer(
            r.plain_gqa(window=None if (index + 1) % 4 == 0 else chunk), routed if (index + 1) % step == 0 else dense
        )
        for index in range(r.num_layers)
    ]


def _mimo(r: Reader) -> list[Layer]:
    value_dim = r.count("v_head_dim")
    full = r.plain_gqa(v_head_dim=value_dim)
    sliding = gqa(
        r.hidden,
        r.count("swa_num_attention_heads"),
        r.count("swa_num_key_value_heads"),
        r.count("swa_head_dim"),
        v_head_dim=r.count("swa_v_head_dim"),
        window=r.count("sliding_window"),
        fmt=r.formats.attention,
    )
    routed = r.routed(width=r.count("moe_intermediate_size"))
    pattern, frequency = r.get("hybrid_layer_pattern"), r.get("moe_layer_freq")
    return [
        _layer(sliding if kind else full, routed if moe else r.dense())
        for kind, moe in zip(pattern, frequency, strict=True)
    ]


def _minimax_m3(r: Reader) -> list[Layer]:
    sparse = r.get("sparse_attention_config")
    width = r.count("moe_intermediate_size")
    routed = r.routed(width=width, shared_width=r.count("shared_intermediate_size"))
    dense = r.dense(r.count("dense_intermediate_size"))
    index_dim = sparse["sparse_index_dim"]
    blocked = r.plain_gqa(
        sparse_read=sparse["sparse_topk_blocks"] * sparse["sparse_block_size"],
        index_heads=sparse["sparse_num_index_heads"],
        index_dim=index_dim,
        index_bytes=2.0 * index_dim,
    )
    return [
        _layer(blocked if is_sparse else r.plain_gqa(), routed if moe else dense)
        for is_sparse, moe in zip(sparse["sparse_attention_freq"], r.get("moe_layer_freq"), strict=True)
    ]


def _step3(r: Reader) -> list[Layer]:
    window = r.count("sliding_window")
    width = r.count("moe_intermediate_size")
    routed = r.routed(width=width, shared_width=r.count("share_expert_dim", default=width))
    dense_first = int(r.get("first_k_dense_replace", 0))
    return [
        _layer(
            r.plain_gqa(window=None if kind == "full_attention" else window),
            r.dense() if index < dense_first else routed,
        )
        for index, kind in enumerate(_layer_types(r, "sliding_attention"))
    ]


def _nemotron_h(r: Reader) -> list[Layer]:
    """One mixer or one feed-forward a layer; experts without a gate (squared ReLU), perhaps in a latent space."""
    pattern = r.get("layers_block_type") or [
        {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}[mark] for mark in r.get("hybrid_override_pattern")
    ]
    mamba = mamba2(
        r.hidden,
        r.count("mamba_num_heads"),
        r.count("mamba_head_dim"),
        r.count("n_groups"),
        r.count("ssm_state_size"),
        r.count("conv_kernel"),
    )
    made: dict[str, Layer] = {"mamba": _layer(mamba, ()), "attention": _layer(r.plain_gqa(), ())}
    if "moe" in pattern:
        made["moe"] = _layer(
            None,
            r.routed(
                width=r.count("moe_intermediate_size"),
                shared_width=int(r.get("moe_shared_expert_intermediate_size", 0)),
                latent=int(r.get("moe_latent_size", 0)),
                gated=False,
            ),
        )
    if "mlp" in pattern:
        made["mlp"] = _layer(None, dense_ffn(r.hidden, r.count("intermediate_size"), gated=False))
    return [made[kind] for kind in pattern]


FAMILIES: dict[str, Callable[[Reader], list[Layer]]] = {
    "llama": _dense_family,
    "mistral": _dense_family,
    "qwen2": _dense_family,
    "qwen3": _dense_family,
    "mixtral": _moe_family,
    "qwen3_moe": _moe_family,
    "glm4_moe": _moe_family,
    "minimax_m2": _moe_family,
    "minimax_m3": _minimax_m3,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "kimi_k25": _deepseek,
    "glm_moe_dsa": _deepseek,
    "deepseek_v4": _deepseek_v4,
    "kimi_linear": _kimi_linear,
    "qwen3_next": _qwen_hybrid,
    "qwen3_5_text": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "gpt_oss": _gpt_oss,
    "gemma4_text": _gemma4,
    "llama4_text": _llama4,
    "mimo_v2_flash": _mimo,
    "step3p7": _step3,
    "nemotron_h": _nemotron_h,
}
"""`model_type` (of the text part, where there is one) → its layers."""

TIED_BY_DEFAULT = ("gemma4_text",)
"""Families whose configurations leave out `tie_word_embeddings` when it is true."""
