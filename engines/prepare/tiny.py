"""A tiny random Llama on disk, as a Hugging Face folder: what tests use where a real model would be too large.

The values are random but shaped so that mistakes show: norm weights differ from 1, logits have a standard
deviation near 2, and the same arguments give the same bytes. It knows nothing of language, so it is no measure
of quality.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hotpass.errors import InputError

BYTES = 256
"""The tokenizer's ids: one for each byte."""

_MERGES = {"Ġt": "Ġ t", "he": "h e"}
"""Of the GGUF's tokenizer: token → what it is merged from."""


def make_tiny_model(
    folder: Path | str,
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = BYTES,
    intermediate: int = 128,
    max_context: int = 512,
    seed: int = 0,
    dtype: str = "float32",
    tie: bool = True,
) -> Path:
    """Write `config.json`, `model.safetensors`, `tokenizer.json` into the folder (made if absent) and return it.

    Token ids below 256 are bytes in the order of `tokenizer.json`; those above, if any, are `<extra_…>`. Raises
    InputError for sizes that no Llama has.
    """
    _check(hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab, dtype=dtype)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(layers, hidden, heads, kv_heads, vocab, intermediate, max_context, dtype, tie)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    tensors = _tensors(config, torch.Generator().manual_seed(seed), getattr(torch, dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, vocab, max_context)
    return folder


def _check(*, hidden: int, heads: int, kv_heads: int, vocab: int, dtype: str) -> None:
    if hidden % heads or (hidden // heads) % 2:
        raise InputError(
            "hidden", hidden, f"does not split into {heads} heads of even size", "use a multiple of 2 * heads"
        )
    if heads % kv_heads:
        raise InputError("kv_heads", kv_heads, f"does not divide {heads} heads", "use a divisor of heads")
    if vocab < BYTES:
        raise InputError("vocab", vocab, "is smaller than the byte alphabet", f"use at least {BYTES}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InputError("dtype", dtype, "is not a dtype of weights here", "use float32, bfloat16 or float16")


def _config(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    intermediate: int,
    max_context: int,
    dtype: str,
    tie: bool,
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": 0,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_context,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": tie,
        "use_cache": True,
        "vocab_size": vocab,
    }


def _tensors(config: dict[str, Any], generator: torch.Generator, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Names as in the transformers state dict; linear weights [out_features, in_features]."""
    hidden: int = config["hidden_size"]
    inner: int = config["intermediate_size"]
    vocab: int = config["vocab_size"]
    queries: int = config["num_attention_heads"] * config["head_dim"]
    keys: int = config["num_key_value_heads"] * config["head_dim"]

    def matrix(out_features: int, in_features: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(out_features, in_features, generator=generator)
        return (values * (gain / math.sqrt(in_features))).to(dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, gain=2.0)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = norm()
        tensors[at + "self_attn.q_proj.weight"] = matrix(queries, hidden)
        tensors[at + "self_attn.k_proj.weight"] = matrix(keys, hidden)
        tensors[at + "self_attn.v_proj.weight"] = matrix(keys, hidden)
        tensors[at + "self_attn.o_proj.weight"] = matrix(hidden, queries)
        tensors[at + "post_attention_layernorm.weight"] = norm()
        tensors[at + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[at + "mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[at + "mlp.down_proj.weight"] = matrix(hidden, inner)
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden, gain=2.0)
    return tensors


def _write_tokenizer(folder: Path, vocab: int, max_context: int) -> None:
    """A byte-level tokenizer without merges: a text of n UTF-8 bytes has n tokens, and decoding gives the text back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate([*alphabet, *(f"<extra_{i}>" for i in range(vocab - BYTES))])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))


def make_tiny_gguf(path: Path | str, *, blocks: str = "Q4_1", head: str = "Q8_0", **sizes: Any) -> Path:
    """The tiny model as llama.cpp stores a Llama: quantised matrices, query and key rows permuted, a head tied to `head` blocks.

    `sizes` are those of `make_tiny_model` (float32, tied); `vocab` is two more by default, for the merges that a
    GGUF tokenizer cannot be without. What a reader makes of the file's values is what the blocks mean, not what went in.
    """
    import gguf

    sizes = {"vocab": BYTES + len(_MERGES), **sizes}
    with tempfile.TemporaryDirectory() as folder:
        plain = make_tiny_model(folder, **sizes)
        config = json.loads((plain / "config.json").read_text())
        alphabet = list(json.loads((plain / "tokenizer.json").read_text())["model"]["vocab"])
        tensors = load_file(plain / "model.safetensors")
    path = Path(path)
    writer = gguf.GGUFWriter(path, "llama")
    _write_gguf_header(writer, config, alphabet[:BYTES] + list(_MERGES) + alphabet[BYTES + len(_MERGES) :])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        values = tensor.numpy()
        for which, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if which in name:
                values = values.reshape(config[heads], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        gguf_name = names.get_name(name.removesuffix(".weight")) + ".weight"
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name, values)
        else:
            kind = gguf.GGMLQuantizationType[head if "embed_tokens" in name else blocks]
            writer.add_tensor(gguf_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_gguf_header(writer: Any, config: dict[str, Any], tokens: list[str]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(list(_MERGES.values()))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
