"""The weights of a prepared model as a mapping of names to tensors, and its tokenizer.

    prepared folder ──mmap──► WeightStore ──cut──► names renumbered ──restricted──► names of one slot
    keeper's memory ─────────►┘

Tensors are views: cutting and restricting copy nothing. Who owns the memory, and whether it may be written, is
the maker's business (`open_weights` maps files privately; a keeper hands out sealed memory).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import safe_open

from hotpass.errors import InputError, MachineError

if TYPE_CHECKING:
    from hotpass.records.deployment import ModelRef

WEIGHTS_FILE = "model.safetensors"
PACKED_FILE = "packed.safetensors"
MODEL_FILE = "hotpass-model.json"
MODULE_FILE = "module.json"
"""Only in the folder of a module (`engines.module.prepare`)."""

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class WeightStore(Mapping[str, torch.Tensor]):
    """Named weights; some also as the blocks that the model's file holds (`packed`)."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        packed: Mapping[str, tuple[str, torch.Tensor]] | None = None,
        epoch: str = "",
    ) -> None:
        """`packed`: name → (format, uint8 [out_features, row_bytes]); every packed name is a name in `tensors` too. `epoch`: the
        keeper's hash of the memory that all of them lie in; empty where they come from files."""
        self.epoch = epoch
        self._tensors = dict(tensors)
        self._packed = dict(packed or {})
        unknown = self._packed.keys() - self._tensors.keys()
        if unknown:
            raise ValueError(f"packed names without values: {sorted(unknown)}")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def packed(self, name: str) -> tuple[str, torch.Tensor] | None:
        """(GGUF format, uint8 [out_features, row_bytes]) of a weight that the file holds in blocks, else None."""
        return self._packed.get(name)

    def packed_names(self) -> tuple[str, ...]:
        """Names that `packed` has blocks for."""
        return tuple(self._packed)

    def restricted(self, slot: str) -> WeightStore:
        """The weights under a slot, names relative to it (`gate_proj.weight` of `model.layers.3.mlp`).

        Slot `model` stands for the whole model: every name, in full.
        """
        if slot == "model":
            return self
        start = slot + "."
        return WeightStore(
            {name.removeprefix(start): tensor for name, tensor in self._tensors.items() if name.startswith(start)},
            {name.removeprefix(start): blocks for name, blocks in self._packed.items() if name.startswith(start)},
        )

    def cut(self, layers: Sequence[int] | None) -> WeightStore:
        """The model with these layers only: layer i of the cut is layer `layers[i]` here. None keeps all."""
        if layers is None:
            return self
        renamed = {name: new for name in self._tensors for new in _names_in_cut(name, layers)}
        return WeightStore(
            {new: self._tensors[name] for name, new in renamed.items()},
            {new: self._packed[name] for name, new in renamed.items() if name in self._packed},
        )


def layer_of(name: str) -> int | None:
    """Layer index in a parameter name or module path (its first number), None outside the layers."""
    return next((int(component) for component in name.split(".") if component.isdigit()), None)


def with_layer(name: str, layer: int) -> str:
    """The name with its layer index replaced."""
    components = name.split(".")
    at = next(index for index, component in enumerate(components) if component.isdigit())
    return ".".join([*components[:at], str(layer), *components[at + 1 :]])


def _names_in_cut(name: str, layers: Sequence[int]) -> list[str]:
    layer = layer_of(name)
    if layer is None:
        return [name]
    return [with_layer(name, layers.index(layer))] if layer in layers else []


def open_weights(ref: ModelRef) -> WeightStore:
    """Map the prepared folder's files; of a cut, only its layers are named.

    A tied `lm_head.weight` is the embedding's tensor. The mappings are private: a write to a tensor stays in this
    process. Raises MachineError when a file is missing or torn.
    """
    folder = Path(ref.folder)
    tensors = _mapped(folder / WEIGHTS_FILE)
    packed: dict[str, tuple[str, torch.Tensor]] = {}
    if ref.packed_formats:
        formats = json.loads((folder / MODEL_FILE).read_text())["packed"]
        packed = {name: (formats[name]["format"], blocks) for name, blocks in _mapped(folder / PACKED_FILE).items()}
    if (folder / MODULE_FILE).exists():
        tied = json.loads((folder / MODULE_FILE).read_text())["tied"]
        tensors |= {name: tensors[owner] for name, owner in tied.items()}
    elif HEAD not in tensors and EMBEDDING in tensors:
        tensors[HEAD] = tensors[EMBEDDING]
        if EMBEDDING in packed:
            packed[HEAD] = packed[EMBEDDING]
    return WeightStore(tensors, packed).cut(ref.layers)


def _mapped(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:  # the library raises its own type and plain OSErrors
        raise MachineError(
            f"{path} cannot be read ({type(error).__name__}: {error}); prepare the model again"
        ) from None


class Tokenizer(Protocol):
    """Text to token ids and back, without special tokens, so that lengths are what was asked for."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    """Tokens that end a sequence, by the model's configuration; empty when it names none."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class FastTokenizer:
    """A `tokenizer.json` through the tokenizers library."""

    def __init__(self, path: Path, eos_ids: tuple[int, ...]) -> None:
        from tokenizers import Tokenizer as Loaded

        self._tokenizer = Loaded.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.eos_ids = eos_ids

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_tokenizer(ref: ModelRef) -> Tokenizer:
    """The prepared model's tokenizer. Raises InputError when the model came without one."""
    folder = Path(ref.folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise InputError("model", ref.name, "has no tokenizer.json", "save its fast tokenizer into the folder")
    eos = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    return FastTokenizer(path, tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),))
