"""Reading a model's files through transformers: a folder as it saves one, or a GGUF file.

    folder ──from_pretrained──► values in the declared dtype
    GGUF ──blocks──► rows in transformers' order (kept) ──dequantised──► values in float32

For a GGUF, transformers gives the configuration, the names, the order of rows and the tokenizer; the values are what its
own loader yields with `GgufConfig(dequantize=True)`, without the extra packages that it asks for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engines.prepare.blocks import FORMATS, dequantize
from hotpass.errors import InputError

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A model in memory, as transformers names it."""

    config: Any
    """The transformers configuration, `architectures` and `dtype` filled in."""
    tensors: Mapping[str, torch.Tensor]
    """The state dict, a tied head once."""
    packed: Mapping[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Name → (GGUF format, uint8 [out_features, row_bytes])."""

    def rounded(self, dtype: str) -> Checkpoint:
        """The same model with every value rounded to the dtype, which becomes the declared one."""
        self.config.dtype = dtype
        return Checkpoint(
            config=self.config,
            tensors={name: tensor.to(getattr(torch, dtype)) for name, tensor in self.tensors.items()},
        )


def read_folder(name: str, folder: Path) -> Checkpoint:
    """A Hugging Face folder (one file or shards). Raises InputError when transformers cannot build or fill the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise _unreadable(name, "config.json cannot be read", error) from None
    if getattr(config, "quantization_config", None) is not None:
        raise InputError("model", name, "is quantised for another loader", "give a GGUF file or the unquantised folder")
    try:
        with _without_progress_bars():
            model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except Exception as error:
        raise _unreadable(name, "cannot be loaded by transformers as a causal language model", error) from None
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise InputError("model", name, f"lacks {len(missing)} weights ({missing[0]}, …)", "give the complete folder")
    return Checkpoint(config=_completed(model.config, model), tensors=_untied(model.state_dict(keep_vars=False)))


def read_gguf(name: str, path: Path) -> Checkpoint:
    """A GGUF file of an architecture that transformers converts. Raises InputError for another, or a damaged file."""
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    try:
        reader = gguf.GGUFReader(path)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        architecture = reader.fields["general.architecture"].contents()
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        names = _gguf_names(model, processor)
    except Exception as error:
        raise _unreadable(name, "is not a GGUF file that transformers converts", error) from None
    values: dict[str, torch.Tensor] = {}
    packed: dict[str, tuple[str, torch.Tensor]] = {}
    for item in reader.tensors:
        raw = gguf.quants.dequantize(item.data, item.tensor_type)
        done = processor.process(
            weights=raw, name=item.name, tensor_key_mapping=names, parsed_parameters={"tensors": values}
        )
        if done.name not in names:
            continue
        values[names[done.name]] = torch.from_numpy(done.weights.copy())
        if item.tensor_type.name in FORMATS and len(item.shape) == 2:
            rows = processor.process(weights=item.data.view("uint8"), name=item.name, tensor_key_mapping=names)
            packed[names[done.name]] = (item.tensor_type.name, torch.from_numpy(rows.weights.copy()))
    missing = sorted(
        model.state_dict().keys() - values.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    )
    if missing:
        raise InputError("model", name, f"lacks {len(missing)} weights ({missing[0]}, …)", "give the complete file")
    config.dtype = "float32"
    return Checkpoint(config=_completed(config, model), tensors=values, packed=_faithful(packed, values))


def write_tokenizer(name: str, source: Path, config: Any, folder: Path) -> None:
    """Put the model's tokenizer into the folder as `tokenizer.json` and its settings, when the model has one.

    Raises InputError for one that transformers cannot convert.
    """
    from transformers import AutoTokenizer

    if source.is_dir():
        for file in _TOKENIZER_FILES:
            if (source / file).exists():
                shutil.copyfile(source / file, folder / file)
        if (folder / "tokenizer.json").exists() or not (source / "tokenizer_config.json").exists():
            return
    try:
        if source.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(source)
        else:  # given the configuration, the file's slow header is parsed once less
            tokenizer = AutoTokenizer.from_pretrained(source.parent, config=config, gguf_file=source.name)
    except Exception as error:
        raise _unreadable(name, "has a tokenizer that transformers cannot convert", error) from None
    tokenizer.save_pretrained(folder)


def _gguf_names(model: torch.nn.Module, processor: Any) -> dict[str, str]:
    """GGUF name → parameter name, by transformers' own table.

    Its function also walks every submodule, for architectures that were converted from an inner model, and builds the
    table anew for each: seconds that are spent only when the outermost names do not suffice.
    """
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    names: dict[str, str] = get_gguf_hf_weights_map(_WithoutChildren(model), processor)
    if set(names.values()) >= model.state_dict().keys():
        return names
    return dict(get_gguf_hf_weights_map(model, processor))


class _WithoutChildren:
    """A model as its names alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


def _faithful(
    packed: Mapping[str, tuple[str, torch.Tensor]], values: Mapping[str, torch.Tensor]
) -> dict[str, tuple[str, torch.Tensor]]:
    """Those blocks that mean exactly the values: a conversion that does more than reorder rows keeps no blocks."""
    return {
        name: (kind, rows)
        for name, (kind, rows) in packed.items()
        if torch.equal(dequantize(kind, rows).view(torch.int32), values[name].view(torch.int32))
    }


def _untied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict with tensors that share memory kept under their first name only."""
    kept: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in state.items():
        kept.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
    return {name: state[name].contiguous() for name in kept.values()}


def _completed(config: Any, model: torch.nn.Module) -> Any:
    config.architectures = [type(model).__name__]
    return config


class _without_progress_bars:
    """transformers draws bars on stderr, where the live view is."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._enabled = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        if self._enabled:
            logging.enable_progress_bar()


def _unreadable(name: str, problem: str, error: Exception) -> InputError:
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    return InputError("model", name, f"{problem} ({type(error).__name__}: {reason})", "see docs for models that work")
