"""One side of a module: a tree of its own over the shared tensors, and what is installed on it.

    words of a step ──decoded──► arguments ──► part that claims `model`, else the module itself ──► answer ──checked──► [batch, width]

It stands where a decoder's side does, so that installing, windows and clean proofs are the same code; there is no KV and no token here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from engines.decoder.attention import StepState
from engines.decoder.batch import Batch
from engines.decoder.kv import KvPool
from engines.decoder.reference import Net
from engines.decoder.side import DecoderSide
from engines.module.inputs import ExampleSpec, places
from engines.module.outputs import flattened
from engines.module.prepare import named_tensors, split_arguments
from engines.program import KvPlan


class ModuleNet(Net):
    """A module as the tree of a side."""

    dynamic = False

    def __init__(self, model: torch.nn.Module, step: StepState) -> None:
        self.config = getattr(model, "config", None) or SimpleNamespace()
        self.model = model
        self.step = step
        self.reason = ""
        self.modules = dict(model.named_modules())
        self.parameters = tuple(model.parameters())
        self.layer_paths = compiled_alone(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def compiled_alone(model: torch.nn.Module) -> tuple[str, ...]:
    """What torch.compile takes at a time: blocks that repeat, each class once (the whole would be compiled for minutes); the whole
    module where none does."""
    found: list[str] = []
    for path, child in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in found)
        if isinstance(child, torch.nn.ModuleList) and not inside:
            kinds = Counter(type(item) for item in child)
            found += [f"{path}.{index}" for index, item in enumerate(child) if kinds[type(item)] > 1]
    return tuple(found) or ("",)


def cloned(model: torch.nn.Module) -> torch.nn.Module:
    """Another tree over the same tensors."""
    memo: dict[int, Any] = {id(tensor): tensor for _, tensor in named_tensors(model)}
    return copy.deepcopy(model, memo)


def assign_tensors(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Parameters and buffers of the tree become the shared ones; tied names get one parameter."""
    made: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                shared = weights[f"{path}.{leaf}" if path else leaf]
                place = shared.data_ptr()
                if place not in made or made[place].shape != shared.shape:
                    made[place] = torch.nn.Parameter(shared.to(device), requires_grad=False)
                module._parameters[leaf] = made[place]
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[leaf] = weights[f"{path}.{leaf}" if path else leaf].to(device)


class ModuleSide(DecoderSide):
    """A named side of the module."""

    takes = frozenset({"threads", "compile_mode"})

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        examples: Sequence[ExampleSpec],
        constants: Mapping[str, torch.Tensor],
        plan: KvPlan,
        threads: int,
        device: torch.device,
    ) -> None:
        self.examples = tuple(examples)
        self._device = device
        self._decoders = [Decoder(example, constants, device) for example in examples]
        self._batches = [_batch(row, example, device) for row, example in enumerate(examples)]
        kv = KvPool(
            num_layers=0, num_slots=0, kv_heads=0, max_context=0, head_dim=0, dtype=torch.float32, device=device
        )
        super().__init__(name, ModuleNet(model, StepState(kv)), kv, plan, threads, None)

    @property
    def vocab_size(self) -> int:
        return max(example.width for example in self.examples)

    @property
    def device(self) -> torch.device:
        return self._device

    def row_batch(self, row: int, step: int, tokens: torch.Tensor) -> Batch:
        """The batch whose `tokens` are the words of one step."""
        return dataclasses.replace(self._batches[row], tokens=tokens)

    def run(self, batch: Batch) -> torch.Tensor:
        """One call: float32 [batch, width]. Raises CandidateFailed when the answer is not of the example's form."""
        (row,) = batch.host_slots
        self.step.begin(batch)
        args, kwargs = self._decoders[row](batch.tokens)
        return flattened(self.forward(*args, **kwargs), self.examples[row], self._device)

    def blank_step(self, row: int) -> torch.Tensor:
        """Zeros, but integers as small as they come in the example: an index of 0 may mean something else there."""
        words = torch.zeros(self.examples[row].num_words, dtype=torch.int64)
        for item, place in places(self.examples[row]):
            if item.kind == "integers":
                words[place] = item.low
        return words

    def load_contexts(self, row: int, contexts: Sequence[torch.Tensor]) -> None:
        """A module has none."""


class Decoder:
    """Words of a step back into the arguments of one example."""

    def __init__(self, example: ExampleSpec, constants: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._drawn = [
            (item, place, getattr(torch, item.dtype), torch.int64 if item.kind == "integers" else torch.float32)
            for item, place in places(example)
        ]
        fixed: dict[str, Any] = {item.name: item.value for item in example.inputs if item.kind == "plain"}
        self._constants = {
            item.name: constants[f"{example.name}/{item.name}"].to(device)
            for item in example.inputs
            if item.kind == "tensor"
        }
        self._order = [item.name for item in example.inputs]
        self._fixed = fixed

    def __call__(self, words: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments. Constants are copies: what is handed to code may be written to."""
        made: dict[str, Any] = {name: tensor.clone() for name, tensor in self._constants.items()} | self._fixed
        for item, place, dtype, carried in self._drawn:
            values = words[place].view(carried)[: item.num_values].view(item.shape)
            made[item.name] = values.to(device=self._device, dtype=dtype, copy=values.data_ptr() % 64 != 0)
        return split_arguments({name: made[name] for name in self._order})


def _batch(row: int, example: ExampleSpec, device: torch.device) -> Batch:
    none = torch.empty(0, dtype=torch.int64, device=device)
    return Batch(
        tokens=none,
        positions=none,
        seq_starts=none,
        slots=none,
        phase="forward",
        num_seqs=example.batch,
        query_tokens=example.batch * example.length,
        context=0,
        host_seq_starts=(),
        host_contexts=(0,) * example.batch,
        host_slots=(row,),
    )
