"""The whole forward of a Llama-family decoder in C++: its weights in tiles, what it points to, and the call.

What the C++ does is told in `model.cpp`, how weights lie in memory in `engines.prepare.tiles`. Nothing here runs per layer.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from engines.prepare.tiles import BLOCK, TILE, pack
from hotpass import part

MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""In the order of model.cpp's roles."""
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@part(
    engine="decoder",
    claims=["model"],
    params={"weights_as": ["gguf", "bf16", "bf16-a16", "fp32", "gguf-a8", "int8", "int8-a8"]},
    numerics="tolerance",
    numerics_when={
        "weights_as=bf16,dtype=float32": "lossy",
        "weights_as=bf16,dtype=float16": "lossy",
        "weights_as=bf16-a16,dtype=float32": "lossy",
        "weights_as=bf16-a16,dtype=float16": "lossy",
        "weights_as=gguf-a8": "lossy",
        "weights_as=int8": "lossy",
        "weights_as=int8-a8": "lossy",
    },
    reload="reweight",
    device="cpu",
    requires=["compiler", "family:llama"],
    requires_when={"weights_as=gguf": "packed", "weights_as=gguf-a8": "packed"},
    native={"model": "model.cpp"},
)
class Model:
    """One C++ function computes the whole step: weights are streamed once, in order, by threads that stay together.

    Decoding at small batch is bound by reading the weights. Eager PyTorch reads them at about half the machine's bandwidth and pays
    for some 600 operator calls a step; here a step is one call, with five barriers a layer and nothing written to memory but the KV
    cache and the logits. `gguf` keeps the file's 4- and 8-bit blocks: a fifth of the bytes of float32 for the same values; `bf16`
    halves them; `int8` quarters them and rounds. What follows a dash is what activations are rounded to: `-a8` to 8 bits for each 32
    columns, and to bfloat16 in prompts on the matrix unit; `-a16` to bfloat16 there and not at all elsewhere. Without it they stay
    float32, on the matrix unit as the sum of three bfloat16. It will not help where arithmetic is the bound (long prompts) on machines
    without a matrix unit, nor where other processes take its cores: threads meet five times a layer, and the slowest sets the pace.
    """

    def weights(self, w: Any, params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """`matrices` uint8 (all tiles, in streaming order), `index` int64 [matrices, 4: start, format, rows, columns], `norms`."""
        if params["weights_as"].startswith("gguf") and not w.packed_names():
            raise ValueError(
                "the model has no packed blocks (it did not come from a GGUF file); use another weights_as"
            )
        layers = 1 + max(int(name.split(".")[2]) for name in w if name.startswith("model.layers."))
        names = [f"model.layers.{layer}.{module}.weight" for layer in range(layers) for module in MODULES]
        tied = w[HEAD].data_ptr() == w[EMBEDDING].data_ptr()
        storage = params["weights_as"].partition("-")[0]
        packed = [pack(w, name, storage) for name in [*names, HEAD, *([] if tied else [EMBEDDING])]]
        starts = itertools.accumulate((item.data.numel() for item in packed), initial=0)
        index = [(start, item.format, item.rows, item.columns) for start, item in zip(starts, packed, strict=False)]
        norms = [f"model.layers.{layer}.{norm}.weight" for layer in range(layers) for norm in NORMS]
        return {
            "matrices": torch.cat([item.data for item in packed]),
            "index": torch.tensor(index + index[-1:] if tied else index, dtype=torch.int64),
            "norms": torch.stack([w[name].float() for name in [*norms, "model.norm.weight"]]),
        }

    def prepare(self, ctx: Any, params: Mapping[str, Any]) -> None:
        config, kv = ctx.config, ctx.kv
        head_dim = _check(config, kv)
        index = ctx.weights["index"].tolist()
        if len(index) != 7 * config.num_hidden_layers + 2:
            raise ValueError(
                f"packed weights are of {(len(index) - 2) // 7} layers, the model has {config.num_hidden_layers}"
            )
        base = ctx.weights["matrices"].data_ptr()
        matrices = (_Matrix * len(index))(
            *[_Matrix(base + start, kind, rows, columns) for start, kind, rows, columns in index]
        )
        cosines, sines = _rotary_tables(config, head_dim, kv.max_context)
        weights = _Weights(
            ctypes.cast(matrices, ctypes.c_void_p),
            ctx.weights["norms"].data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
        )
        keys = (ctypes.c_void_p * kv.num_layers)(*[kv.keys(layer).data_ptr() for layer in range(kv.num_layers)])
        values = (ctypes.c_void_p * kv.num_layers)(*[kv.values(layer).data_ptr() for layer in range(kv.num_layers)])
        slot, head, position, _ = kv.keys(0).stride()
        cache = _Cache(
            ctypes.cast(keys, ctypes.c_void_p), ctypes.cast(values, ctypes.c_void_p), slot, head, position,
            int(kv.dtype == torch.bfloat16),
        )  # fmt: skip
        dims = _Dims(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim,
            config.intermediate_size, config.vocab_size, kv.max_context, int("-" in params["weights_as"]), config.rms_norm_eps,
        )  # fmt: skip
        library = ctx.native["model"]
        library.hp_model_create.restype = ctypes.c_void_p
        library.hp_model_create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        library.hp_model_destroy.argtypes = [ctypes.c_void_p]
        library.hp_model_destroy.restype = None
        self._step = library.hp_model_step
        self._step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._step.restype = ctypes.c_int64
        self._destroy = library.hp_model_destroy
        self._model = library.hp_model_create(
            ctypes.byref(dims), ctypes.byref(weights), ctypes.byref(cache), ctx.threads
        )
        if not self._model:
            raise MemoryError("no memory or no threads for the model's scratch space")
        self._vocab = config.vocab_size
        self._alive = (ctx.weights, matrices, cosines, sines, keys, values, kv)  # what the model points to

    def forward(self, batch: Any, kv: Any) -> torch.Tensor:
        logits = torch.empty(batch.num_seqs, self._vocab)
        step = _Batch(
            batch.tokens.data_ptr(), batch.positions.data_ptr(), batch.seq_starts.data_ptr(), batch.slots.data_ptr(),
            batch.num_seqs, batch.query_tokens,
        )  # fmt: skip
        if self._step(self._model, ctypes.byref(step), logits.data_ptr()):
            raise MemoryError(f"no memory for a step of {batch.query_tokens} tokens")
        return logits

    def close(self) -> None:
        if getattr(self, "_model", None):
            self._destroy(self._model)
            self._model = None
            self._alive = ()


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("format", ctypes.c_int64), ("rows", ctypes.c_int64), ("columns", ctypes.c_int64),
    )  # fmt: skip


class _Dims(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "positions", "narrow",
        )),
        ("eps", ctypes.c_double),
    )  # fmt: skip


class _Weights(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("matrices", "norms", "cosines", "sines"))


class _Cache(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride", "position_stride", "is_bf16")),
    )  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "seq_starts", "slots")),
        ("num_seqs", ctypes.c_int64), ("num_tokens", ctypes.c_int64),
    )  # fmt: skip


def _check(config: Any, kv: Any) -> int:
    """head_dim of a model that the C++ can run; raises ValueError naming what it cannot."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise ValueError(f"cpp-model has no {name}")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise ValueError(f"cpp-model computes SiLU, the model wants {config.hidden_act}")
    if head_dim % TILE or config.hidden_size % BLOCK or config.intermediate_size % BLOCK:
        raise ValueError("cpp-model needs head_dim in multiples of 16, hidden and intermediate size in multiples of 32")
    if config.num_attention_heads * head_dim % BLOCK:
        raise ValueError("cpp-model needs heads * head_dim in multiples of 32")
    if config.num_attention_heads // config.num_key_value_heads > 64:
        raise ValueError("cpp-model serves at most 64 query heads for each KV head")
    if kv.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"cpp-model reads float32 and bfloat16 KV caches, not {kv.dtype}")
    strides = {kv.keys(layer).stride() for layer in range(kv.num_layers)} | {
        kv.values(layer).stride() for layer in range(kv.num_layers)
    }
    if len(strides) != 1 or kv.keys(0).stride(-1) != 1:
        raise ValueError(
            f"cpp-model needs all KV tensors in one layout with head_dim contiguous, not {sorted(strides)}"
        )
    return int(head_dim)


def _rotary_tables(config: Any, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin float32 [positions, head_dim / 2], as the model's own rotary embedding computes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config=config)
    kind = getattr(rotary, "rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"cpp-model does not do rotary type {kind}, whose angles depend on the length")
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None])
    if cos.shape[-1] != head_dim:
        raise ValueError("cpp-model does not do partial rotary embeddings")
    half = head_dim // 2
    return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()
