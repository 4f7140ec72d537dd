"""`cpp-model` over a KV pool of its own, in this process and without an engine: for figures that take many short turns.

What is not here: any check of what it computes; the engine's judge does that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig

from engines.build_native import build_native
from engines.decoder.batch import Batch, build_batch
from engines.decoder.kv import KvPool
from engines.decoder.source import compile_part
from engines.prepare.store import open_weights
from hotpass.parts import declaration, read_part
from hotpass.records.candidate import Value
from hotpass.records.deployment import ModelRef
from search.catalogue import find_part


class CppSide:
    """A prepared part. Close it: it has threads."""

    def __init__(
        self,
        model: ModelRef,
        params: Mapping[str, Value],
        *,
        slots: int,
        positions: int,
        threads: int,
        folder: str = "",
    ) -> None:
        """`folder`: where the part is read from; without it the catalogue's. `positions`: longest context of a slot."""
        source = read_part(Path(folder)) if folder else find_part("cpp-model")
        use = declaration(source).bind(source, params)
        built = build_native(source, declaration(source), use.params)
        self.kv = KvPool(
            num_layers=model.num_layers,
            num_slots=slots,
            kv_heads=model.num_kv_heads,
            max_context=positions,
            head_dim=model.head_dim,
            dtype=getattr(torch, model.dtype),
            device=torch.device("cpu"),
        )
        compiled = compile_part(use)
        self._part: Any = compiled.cls()
        compiled.forget()
        self._part.prepare(
            SimpleNamespace(
                weights=self._part.weights(open_weights(model), use.params),
                config=AutoConfig.from_pretrained(model.folder),
                kv=self.kv,
                threads=threads,
                native={name: ctypes.CDLL(str(path)) for name, path in built.items()},
            ),
            use.params,
        )

    def step(self, batch: Batch) -> torch.Tensor:
        """float32 [num_seqs, vocab]."""
        logits: torch.Tensor = self._part.forward(batch, self.kv)
        return logits

    def generate(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Greedy; prompt i in slot i, all of them in one step."""
        lengths, slots = [len(prompt) for prompt in prompts], list(range(len(prompts)))
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        contexts, queries = [0] * len(prompts), lengths
        for step in range(new_tokens):
            tokens = self.step(build_batch(tokens, contexts=contexts, query_lens=queries, slots=slots)).argmax(1)
            contexts, queries = [length + step for length in lengths], [1] * len(prompts)

    def close(self) -> None:
        self._part.close()
