"""`prepare_model`: from a model's name to a prepared folder, made once and checked whenever it is opened.

    name ──locate──► files ──read──► Checkpoint ──write──► cache/models/<key>/ ──► ModelRef
                                                               config.json, tokenizer files, model.safetensors,
                                                               packed.safetensors, hotpass-model.json (last)

A cut is not a folder of its own: its ModelRef names the layers, and `open_weights` renumbers them.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.prepare.cache import cache_root, make_once
from engines.prepare.sources import Progress, Source, file_sha256, locate
from engines.prepare.store import MODEL_FILE, PACKED_FILE, WEIGHTS_FILE, layer_of
from hotpass.canonical import content_hash, to_plain
from hotpass.errors import InputError
from hotpass.records.deployment import ModelRef

if TYPE_CHECKING:
    import torch

    from engines.prepare.checkpoints import Checkpoint

FOLDER_VERSION = 1
"""Of the prepared folder; a change makes every model be prepared again."""

_DTYPES = ("float32", "bfloat16", "float16")
_LAYERS = re.compile(r"(?P<name>.+)@layers=(?P<layers>[0-9]+(,[0-9]+)*)")
_NOT_IDENTITY = ("transformers_version", "_name_or_path", "_model_name_or_path")


def prepare_model(
    name: str,
    *,
    cache_dir: Path | str | None = None,
    layers: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> ModelRef:
    """The model as a prepared folder on this disk; the second call only checks it.

    `name`: an alias (`smollm2-135m`, `smollm2-135m-bf16`), a GGUF file, a Hugging Face folder, a hub id, or a prepared
    folder; `@layers=0,1,2` (or `layers`) keeps those layers only. The cache is `cache_dir`, else HOTPASS_CACHE, else
    ~/.cache/hotpass. Raises InputError for a model that is not there or cannot be read, MachineError for the disk or PyPI.
    """
    told = progress or (lambda _: None)
    base, kept = _split_name(name, layers)
    folder = Path(base).expanduser()
    if not ((folder / MODEL_FILE).exists() and is_whole(folder)):
        cache = cache_root(cache_dir)
        source = locate(base, cache, told)
        key = content_hash([FOLDER_VERSION, source.identity, source.round_to])[:24]

        def make(temporary: Path) -> None:
            told(f"preparing {base}")
            _write(temporary, source)

        folder = make_once(cache / "models" / key, ready=is_whole, make=make)
    return cut_model(_ref(folder.absolute(), base), kept)


def cut_model(ref: ModelRef, layers: Sequence[int] | None) -> ModelRef:
    """The model with these layers of the whole one, in this order; None, or all of them, is the whole model."""
    if ref.layers is not None:
        raise InputError("layers", layers, f"cut {ref.name} a second time", "give the layers of the whole model")
    if layers is None or list(layers) == list(range(ref.num_layers)):
        return ref
    wrong = [layer for layer in layers if not 0 <= layer < ref.num_layers]
    if wrong or not layers or len(set(layers)) != len(layers):
        raise InputError(
            "layers",
            list(layers),
            f"are not layers of {ref.name}",
            f"name each of 0..{ref.num_layers - 1} once at most",
        )
    return dataclasses.replace(
        ref,
        name=f"{ref.name}@layers={','.join(map(str, layers))}",
        layers=tuple(layers),
        num_layers=len(layers),
        num_params=_params_of_cut(Path(ref.folder), layers),
        weights_hash=content_hash([ref.weights_hash, list(layers)]),
    )


def is_whole(folder: Path) -> bool:
    """True when each file is the one that was written: same size and time, or else the same SHA-256."""
    try:
        files = json.loads((folder / MODEL_FILE).read_text())["files"]
        return all(_unchanged(folder / name, facts) for name, facts in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _unchanged(path: Path, facts: Mapping[str, Any]) -> bool:
    stat = path.stat()
    if stat.st_size != facts["bytes"]:
        return False
    return bool(stat.st_mtime_ns == facts["mtime_ns"] or file_sha256(path) == facts["sha256"])


def _split_name(name: str, layers: Sequence[int] | None) -> tuple[str, Sequence[int] | None]:
    match = _LAYERS.fullmatch(name)
    if match is None:
        if "@layers=" in name:
            raise InputError("model", name, "has layers that are not numbers", "write name@layers=0,1,2")
        return name, layers
    if layers is not None:
        raise InputError("layers", list(layers), f"are given twice, in {name!r} too", "give them once")
    return match["name"], [int(layer) for layer in match["layers"].split(",")]


def _write(folder: Path, source: Source) -> None:
    """Fill a prepared folder; hotpass-model.json comes last, with the hash of everything else."""
    from engines.prepare.checkpoints import read_folder, read_gguf, write_tokenizer

    checkpoint = read_gguf(source.name, source.path) if source.is_gguf else read_folder(source.name, source.path)
    if source.round_to is not None:
        checkpoint = checkpoint.rounded(source.round_to)
    dtype = str(checkpoint.config.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise InputError("model", source.name, f"declares dtype {dtype}", f"use one of {', '.join(_DTYPES)}")
    checkpoint.config.save_pretrained(folder)
    write_tokenizer(source.name, source.path, checkpoint.config, folder)
    _save(checkpoint.tensors, folder / WEIGHTS_FILE)
    if checkpoint.packed:
        _save({name: rows for name, (_, rows) in checkpoint.packed.items()}, folder / PACKED_FILE)
    files = {
        path.name: {"bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
    }
    written = _facts(folder, checkpoint, dtype, files)
    (folder / MODEL_FILE).write_text(json.dumps(written, indent=1, sort_keys=True))


def _facts(folder: Path, checkpoint: Checkpoint, dtype: str, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    config = checkpoint.config.get_text_config()
    plain = json.loads((folder / "config.json").read_text())
    identity = {key: value for key, value in plain.items() if key not in _NOT_IDENTITY}
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    ref = ModelRef(
        name="",
        folder="",
        architecture=checkpoint.config.architectures[0],
        dtype=dtype,
        num_layers=int(config.num_hidden_layers),
        layers=None,
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        hidden_size=hidden,
        intermediate_size=_intermediate_size(config, hidden),
        vocab_size=int(config.vocab_size),
        max_context=int(config.max_position_embeddings),
        num_params=sum(tensor.numel() for tensor in checkpoint.tensors.values()),
        packed_formats=tuple(sorted({kind for kind, _ in checkpoint.packed.values()})),
        config_hash=content_hash(identity),
        weights_hash=content_hash([files[name]["sha256"] for name in (WEIGHTS_FILE, PACKED_FILE) if name in files]),
        tokenizer_hash=content_hash([files[name]["sha256"] for name in ("tokenizer.json",) if name in files]),
    )
    packed = {
        name: {"format": kind, "shape": list(checkpoint.tensors[name].shape)}
        for name, (kind, _) in checkpoint.packed.items()
    }
    return {**to_plain(ref), "folder_version": FOLDER_VERSION, "packed": packed, "files": files}


def _intermediate_size(config: Any, hidden: int) -> int:
    """Width of the feed-forward block under the names in use; older configurations leave it out where it is 4 × hidden."""
    for name in ("intermediate_size", "ffn_dim", "n_inner"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 4 * hidden


def _ref(folder: Path, name: str) -> ModelRef:
    written = json.loads((folder / MODEL_FILE).read_text())
    fields = {item.name: written[item.name] for item in dataclasses.fields(ModelRef)}
    fields |= {"name": name, "folder": str(folder), "packed_formats": tuple(fields["packed_formats"])}
    return ModelRef(**fields)


def _params_of_cut(folder: Path, layers: Sequence[int]) -> int:
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        total = 0
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if (layer := layer_of(name)) is None or layer in layers:
                size = 1
                for extent in file.get_slice(name).get_shape():
                    size *= extent
                total += size
        return total


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, "No space left on device", str(path)) from error
        raise
