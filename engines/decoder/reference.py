"""The reference forward: transformers' own modules over shared weights, run on flat ragged batches.

    config.json ──meta──► module tree ──assign──► parameters are the weights' own memory (nothing copied, the head tied)
    forward(batch, kv): tree(tokens, positions) ──`hotpass` attention──► kv ──head, last rows only──► logits [num_seqs, vocab]

A net whose attention is not plain full attention cannot run this way: `Net.ragged` is False then, `Net.reason` says why, and
`own_cache.py` runs it with transformers' own cache, one per request.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines.decoder.attention import NAME, StepState
from engines.decoder.batch import Batch, build_batch
from engines.decoder.kv import KvPool
from hotpass.errors import InputError, MachineError

PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that need no trial: full attention through the attention interface, unless a layer type or a window says otherwise."""


def cut_config(folder: str, layers: Sequence[int] | None) -> Any:
    """The model's configuration with only these layers; None keeps all."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if layers is not None:
        config = copy.deepcopy(config)
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[layer] for layer in layers]
    return config


def why_not_ragged(config: Any) -> str:
    """Why a configuration cannot share KV slots in one flat batch; empty when nothing speaks against it."""
    types = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if types:
        return f"{config.model_type} has layers of type {', '.join(sorted(types))}"
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if window and not getattr(config, "layer_types", None):
        return f"{config.model_type} has a sliding window"
    if getattr(config, "kv_lora_rank", None):
        return f"{config.model_type} has latent attention"
    return ""


class Net:
    """One module tree over shared weights, and the ragged forward through it."""

    dynamic = True
    """Whether compiled code takes numbers of tokens as they come; else it is compiled for each shape row."""

    def __init__(self, config: Any, model: torch.nn.Module, step: StepState, reason: str) -> None:
        self.config = config
        self.model = model
        self.step = step
        self.reason = reason
        """Why the tree runs with its own cache; empty when it runs ragged."""
        self.modules: dict[str, torch.nn.Module] = dict(model.named_modules())

        self.parameters: tuple[torch.Tensor, ...] = tuple(model.parameters())
        self.layer_paths: tuple[str, ...] = _layer_paths(model, int(config.num_hidden_layers))

    @property
    def ragged(self) -> bool:
        return not self.reason

    def forward(self, batch: Batch, kv: KvPool, *, every_position: bool = False) -> torch.Tensor:
        """Logits float32 [num_seqs, vocab] of the last token of each sequence, or [T, vocab] of every token; writes the KV of each."""
        outer = self.step.batch
        if outer is not batch:
            self.step.begin(batch)
        # 0 keeps every row, and in a decode step every row is a last one
        every = every_position or batch.query_tokens == batch.num_seqs
        last: int | torch.Tensor = 0 if every else batch.seq_starts[1:] - 1
        out = self.model(
            input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False, logits_to_keep=last
        )
        if outer is not None and outer is not batch:
            self.step.begin(outer)
        return out.logits[0].float()  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def only(self, layers: Sequence[int]) -> Iterator[None]:
        """Passes go through these decoder layers, then the last norm and the head; through every layer where none is given."""
        if not layers:
            yield
            return
        path, _, name = self.layer_paths[0].rpartition(".")[0].rpartition(".")
        owner = self.model.get_submodule(path)
        whole = owner._modules[name]
        owner._modules[name] = torch.nn.ModuleList(self.modules[self.layer_paths[layer]] for layer in layers)
        try:
            yield
        finally:
            owner._modules[name] = whole


def build_net(
    config: Any, weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device, attention: str = NAME
) -> torch.nn.Module:
    """The module tree with `weights` as its parameters, in evaluation mode. Parameters of another dtype are converted copies."""
    with torch.device("meta"), _quiet(), torch.inference_mode(False):
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=dtype)
    model.eval()
    _fill_buffers(model, device)
    _assign(model, weights, dtype, device)
    return model  # type: ignore[no-any-return]


def check_ragged(net: Net, kv: KvPool, device: torch.device) -> str:
    """Why the tree cannot run ragged, by trying: a prefill and a decode step against one pass without any cache."""
    tokens = torch.arange(1, 6, device=device) % net.config.vocab_size
    try:
        with torch.inference_mode():
            whole = net.forward(build_batch(tokens, contexts=[0], query_lens=[5], slots=[0]), kv)
            calls = net.step.calls
            net.forward(build_batch(tokens[:4], contexts=[0], query_lens=[4], slots=[0]), kv)
            steps = net.forward(build_batch(tokens[4:], contexts=[4], query_lens=[1], slots=[0]), kv)
    except Exception as error:
        return f"{net.config.model_type} does not run over KV slots ({type(error).__name__}: {error})"
    if calls != net.config.num_hidden_layers:
        return f"{net.config.model_type} does not attend through transformers' attention interface"
    limit = (1e-4 if whole.dtype == kv.dtype == torch.float32 else 0.05) * float(whole.abs().max())
    if not torch.allclose(whole, steps, rtol=0, atol=limit):
        return f"{net.config.model_type} gives other logits over KV slots"
    return ""


def bind_step(model: torch.nn.Module, step: StepState) -> None:
    """Let every attention module of the tree find the step that runs."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.__dict__["hotpass_step"] = step


def _layer_paths(model: torch.nn.Module, num_layers: int) -> tuple[str, ...]:
    """Module paths of the decoder layers: the first list with as many modules as the model has layers."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return tuple(f"{name}.{index}" for index in range(num_layers))
    return ()


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Buffers that no file holds (rotary frequencies), as transformers itself initialises them, in their own dtype."""
    for module in model.modules():
        held = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in held.items():
            module._buffers[name] = torch.zeros_like(buffer, device=device)
        if held:
            model._init_weights(module)


def _assign(model: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
    shared: dict[int, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = f"{name}.{leaf}" if name else leaf
            value = _value(model, weights, full)
            if value.shape != parameter.shape:
                raise InputError(
                    "model", full, f"has shape {tuple(value.shape)}, not {tuple(parameter.shape)}", "prepare it again"
                )
            if id(value) not in shared:
                shared[id(value)] = torch.nn.Parameter(value.to(device=device, dtype=dtype), requires_grad=False)
            module._parameters[leaf] = shared[id(value)]
        for leaf, buffer in module._buffers.items():
            full = f"{name}.{leaf}" if name else leaf
            if buffer is not None and full in weights:
                buffer.copy_(weights[full])


def _value(model: Any, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    tied = dict(getattr(model, "_tied_weights_keys", None) or {}) if model.config.tie_word_embeddings else {}
    if name in tied and tied[name] in weights:
        return weights[tied[name]]
    if name not in weights:
        raise MachineError(f"the prepared model has no weight named {name}; prepare it again")
    return weights[name]


class _quiet:
    """transformers logs advice about configurations while it builds; none of it concerns a prepared model."""

    def __enter__(self) -> None:
        self._level = logging.getLogger("transformers").level
        logging.getLogger("transformers").setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("transformers").setLevel(self._level)
