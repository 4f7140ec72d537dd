"""A tiny random Llama as float32, bfloat16 or GGUF blocks, and a C++ part of the catalogue on it, without an engine.

The reference is transformers' own model in float32 over the very values that the blocks stand for.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engines.build import find_compiler
from engines.decoder.batch import Batch, build_batch
from engines.decoder.kv import KvPool
from engines.decoder.source import compile_part
from engines.prepare.store import WeightStore
from hotpass.parts import declaration
from hotpass.records.candidate import PartSource
from search.catalogue import find_part

ISAS: dict[str, tuple[str, ...]] = {
    "native": (),
    "avx2": ("-mno-avx512f",),
    "portable": ("-mno-avx",),
}
"""Compiler flags that take instruction sets away; where the machine has none of them, all are the same code."""

FORMATS = {"Q4_0": gguf.GGMLQuantizationType.Q4_0, "Q4_1": gguf.GGMLQuantizationType.Q4_1, "Q5_0": gguf.GGMLQuantizationType.Q5_0,
           "Q8_0": gguf.GGMLQuantizationType.Q8_0}  # fmt: skip


def config(**changes: Any) -> LlamaConfig:
    """Sizes that divide nothing evenly: 3 blocks of 32 columns, 5 in the MLP, 251 tokens, 3 query heads for each KV head."""
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 160, "vocab_size": 251, "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig(**(sizes | changes))


def model(
    made: LlamaConfig, *, blocks: Mapping[str, str] | None = None, rounded: bool = False, seed: int = 0
) -> tuple[WeightStore, LlamaForCausalLM]:
    """Weights and their reference. `blocks`: end of a module's name → GGUF format of its weight. `rounded`: values are bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    net = LlamaForCausalLM(made).eval().requires_grad_(False)
    packed: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in net.named_parameters():
        norm = "norm" in name
        tensor.copy_(
            torch.randn(tensor.shape, generator=generator) * (0.2 if norm else tensor.shape[1] ** -0.5) + float(norm)
        )
        if rounded:
            tensor.copy_(tensor.bfloat16().float())
        kind = next((kind for end, kind in (blocks or {}).items() if name.endswith(f"{end}.weight")), None)
        if kind is not None:
            raw = gguf.quants.quantize(tensor.numpy(), FORMATS[kind])
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(raw, FORMATS[kind])))
            packed[name] = (kind, torch.from_numpy(np.ascontiguousarray(raw)))
    dtype = torch.bfloat16 if rounded else torch.float32
    tensors = {name: tensor.to(dtype) for name, tensor in net.named_parameters()}
    if made.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        if "model.embed_tokens.weight" in packed:
            packed["lm_head.weight"] = packed["model.embed_tokens.weight"]
    return WeightStore(tensors, packed), net


def library(source: PartSource, folder: Path, isa: str = "native") -> dict[str, ctypes.CDLL]:
    """The part's C++ for an instruction set, compiled quickly."""
    compiler = find_compiler()
    assert compiler is not None
    home = Path(folder) / source.name
    loaded = {}
    for path, text in source.files:
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    for name, file in declaration(source).native.items():
        target = home / f"{name}-{isa}.so"
        command = [
            compiler.path,
            "-O1",
            compiler.native_flag,
            *ISAS[isa],
            "-std=c++17",
            "-fPIC",
            "-shared",
            "-fopenmp",
            "-w",
        ]
        subprocess.run([*command, str(home / file), "-o", str(target)], check=True)
        loaded[name] = ctypes.CDLL(str(target))
    return loaded


class Whole:
    """`cpp-model` prepared over a KV pool of NaN."""

    def __init__(
        self, native: Mapping[str, ctypes.CDLL], store: WeightStore, made: LlamaConfig, weights_as: str, *,
        threads: int = 2, kv_dtype: torch.dtype = torch.float32, slots: int = 4, max_context: int = 192,
    ) -> None:  # fmt: skip
        source = find_part("cpp-model")
        use = declaration(source).bind(source, {"weights_as": weights_as})
        compiled = compile_part(use)
        self.part = compiled.cls()
        compiled.forget()
        self.kv = KvPool(
            num_layers=made.num_hidden_layers, num_slots=slots, kv_heads=made.num_key_value_heads, max_context=max_context,
            head_dim=made.head_dim, dtype=kv_dtype, device=torch.device("cpu"),
        )  # fmt: skip
        self.kv.poison(range(slots))
        weights = self.part.weights(store, use.params)
        self.part.prepare(
            SimpleNamespace(weights=weights, config=made, kv=self.kv, threads=threads, native=native), use.params
        )

    def __call__(self, tokens: Sequence[Sequence[int]], contexts: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        out: torch.Tensor = self.part.forward(batch(tokens, contexts, slots), self.kv)
        return out

    def close(self) -> None:
        self.part.close()


def batch(tokens: Sequence[Sequence[int]], contexts: Sequence[int], slots: Sequence[int]) -> Batch:
    flat = torch.tensor(list(itertools.chain.from_iterable(tokens)))
    return build_batch(flat, contexts=contexts, query_lens=[len(item) for item in tokens], slots=slots)


def text(length: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def every_logit(net: LlamaForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens), vocab] by the reference."""
    with torch.inference_mode():
        logits: torch.Tensor = net(torch.tensor([list(tokens)])).logits[0]
    return logits
