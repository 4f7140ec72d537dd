"""Tiny random models of several families, loaded into a program, beside the same model in transformers' own hands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma3 import Gemma3TextConfig

from engines.decoder.program import DecoderProgram
from engines.decoder.source import compile_part, derive
from engines.prepare.store import WeightStore
from engines.program import Artefacts, KvPlan, WindowInputs, WindowReply
from hotpass.records.candidate import Candidate, PartSource, PartUse, Value
from hotpass.records.deployment import ModelRef
from hotpass.records.shapes import Phase, ShapeRow

VOCAB = 97
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-untied": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 4}, tie_word_embeddings=False),
    "llama3-rope": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "gpt2": lambda: GPT2Config(
        n_embd=32, n_layer=3, n_head=4, vocab_size=VOCAB, n_positions=256, bos_token_id=None, eos_token_id=None
    ),
    "gemma3": lambda: Gemma3TextConfig(**_SIZES, head_dim=8, sliding_window=8),
}


def shape_row(phase: Phase, num_seqs: int, query_tokens: int, mean: int, longest: int | None = None) -> ShapeRow:
    return ShapeRow(
        phase=phase,
        num_seqs=num_seqs,
        query_tokens=query_tokens,
        context_mean=mean,
        context_max=mean if longest is None else longest,
        steps_share=0.25,
        tokens_share=0.25,
    )


ROWS = (
    shape_row(Phase.DECODE, 3, 3, 12, 20),
    shape_row(Phase.DECODE, 2, 2, 9),
    shape_row(Phase.PREFILL, 2, 9, 6, 7),
    shape_row(Phase.MIXED, 3, 8, 7),
    shape_row(Phase.PREFILL, 1, 11, 0),
    shape_row(Phase.DECODE, 6, 6, 5, 8),
)
PLAN = KvPlan(rows=ROWS, steps_per_window=(4, 3, 2, 2, 2, 2), serving_slots=4, serving_context=48)


@dataclass(kw_only=True)
class World:
    """A program with a model loaded, and the model as transformers has it."""

    program: DecoderProgram
    truth: Any
    """transformers' model in float32, of the same values."""
    store: WeightStore
    cuts: list[tuple[int, ...]]
    plan: KvPlan = PLAN

    def tokens(self, *shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))

    def contexts(self, row: int, seed: int = 0) -> list[torch.Tensor]:
        """Context tokens of each sequence of a row."""
        lengths = self.plan.row_contexts(row)
        return [self.tokens(length, seed=100 * row + 10 * seed + i) for i, length in enumerate(lengths)]

    def prepare_row(self, side: str, row: int, cut: int = 0) -> None:
        """Contexts computed by the reference, loaded into a side."""
        kv = self.program.compute_contexts(cut, row, self.contexts(row))
        self.program.load_contexts(side, cut, row, kv)

    def window(
        self, side: str, row: int, cut: int = 0, seed: int = 5, prepare: bool = True
    ) -> tuple[torch.Tensor, WindowReply]:
        """Logits [steps, num_seqs, vocab] and the reply of one window."""
        if prepare:
            self.prepare_row(side, row, cut)
        steps, item = self.plan.steps_per_window[row], self.plan.rows[row]
        out = torch.full((steps, item.num_seqs, VOCAB), float("nan"))
        inputs = WindowInputs(tokens=self.tokens(steps, item.query_tokens, seed=seed), nonce="n1")
        return out, self.program.run_window(side, cut, row, inputs, out)

    def expected(self, row: int, seed: int = 5) -> torch.Tensor:
        """What transformers gives for that window, each sequence alone and from its first token."""
        steps, item = self.plan.steps_per_window[row], self.plan.rows[row]
        tokens = self.tokens(steps, item.query_tokens, seed=seed)
        lens = self.plan.row_query_lens(row)
        contexts = self.contexts(row)
        out = torch.empty(steps, item.num_seqs, VOCAB)
        for step in range(steps):
            start = 0
            for index, length in enumerate(lens):
                new = tokens[step, start : start + length]
                if item.phase == Phase.DECODE:
                    new = tokens[: step + 1, index]
                out[step, index] = self.logits(torch.cat([contexts[index], new]))[-1]
                start += length
        return out

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.truth(tokens[None], use_cache=False).logits[0].float()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """transformers' greedy continuation, recomputed from the start for every token."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(torch.tensor(tokens))[-1].argmax()))
        return tokens[len(prompt) :]

    def candidate(self, *sources: str, settings: dict[str, Value] | None = None) -> Candidate:
        uses = [
            PartUse(source=PartSource(name=f"part{i}", files=(("part.py", text),))) for i, text in enumerate(sources)
        ]
        return Candidate(parts=tuple(uses), settings=settings or {})

    def artefacts(self, candidate: Candidate, cut: int = 0) -> Artefacts:
        """Derived weights of every slot that its parts claim, made here instead of in a builder."""
        store = self.store.cut(self.cuts[cut])
        table = self.program._table(cut)
        derived = []
        for use in candidate.parts:
            part = compile_part(use)
            slots = [slot.name for claim in part.declared.claims for slot in table.matching(claim)]
            derived.append({slot: derive(part, store.restricted(slot)) for slot in slots})
            part.forget()
        return Artefacts(native=tuple({} for _ in candidate.parts), derived=tuple(derived))

    def install(self, *sources: str, settings: dict[str, Value] | None = None, cut: int = 0) -> Any:
        candidate = self.candidate(*sources, settings=settings)
        return self.program.install("candidate", candidate, self.artefacts(candidate, cut), cut)


def build_world(
    folder: Path,
    family: str = "llama",
    *,
    dtype: str = "float32",
    cuts: Sequence[tuple[int, ...]] = ((0, 1, 2), (0, 2)),
    plan: KvPlan = PLAN,
) -> World:
    config = CONFIGS[family]()
    generator = torch.Generator().manual_seed(1)
    truth = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    for name, parameter in truth.named_parameters():
        spread = 0.1 if parameter.ndim == 1 else 1 / math.sqrt(parameter.shape[-1])
        values = torch.randn(parameter.shape, generator=generator) * spread
        parameter.data.copy_(values + (1.0 if "norm" in name or "ln_" in name else 0.0))
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    state = {name: tensor.contiguous() for name, tensor in truth.state_dict().items() if name not in tied}
    save_file(state, folder / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    if tied:
        tensors["lm_head.weight"] = tensors[truth._tied_weights_keys["lm_head.weight"]]
    heads = config.num_attention_heads
    ref = ModelRef(
        name=family,
        folder=str(folder),
        architecture=type(truth).__name__,
        dtype=dtype,
        num_layers=config.num_hidden_layers,
        layers=None,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        intermediate_size=48,
        vocab_size=VOCAB,
        max_context=256,
        num_params=sum(p.numel() for p in truth.parameters()),
        packed_formats=(),
        config_hash="",
        weights_hash="",
        tokenizer_hash="",
    )
    program = DecoderProgram()
    store = WeightStore(tensors)
    program.load(ref, store, list(cuts), "cpu", 1, plan)
    return World(program=program, truth=truth.float(), store=store, cuts=list(cuts), plan=plan)


@pytest.fixture(scope="module")
def make_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    """Worlds by family and dtype; the same arguments give the same world within a module."""
    known: dict[tuple[Any, ...], World] = {}

    def make(family: str = "llama", **options: Any) -> World:
        key = (family, *sorted((name, str(value)) for name, value in options.items()))
        if key not in known:
            known[key] = build_world(tmp_path_factory.mktemp("model"), family, **options)
        return known[key]

    return make


@pytest.fixture
def world(make_world: Callable[..., World]):  # type: ignore[no-untyped-def]
    """The tiny Llama, with nothing installed before and after."""
    made = make_world()
    yield made
    made.program.uninstall("candidate")
    made.program.uninstall("incumbent")


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.compile traces and guards as ever but generates no code (that takes a compiler, and most of a minute).

    The list gets the class of each forward that is compiled.
    """
    compiled: list[str] = []
    real = torch.compile

    def traced(function: Any, **options: Any) -> Any:
        name = getattr(function, "__qualname__", type(function).__name__)
        compiled.append(name.split(".")[0] if "." in name else name)
        return real(function, backend="eager", dynamic=options.get("dynamic"))

    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()
    return compiled
