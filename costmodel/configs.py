"""Finding a model's config.json: a file, a folder, a hub id in the local cache, among those bundled with the kernel tables, on the hub."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from costmodel.graph import ModelGraph, graph_of
from hotpass.errors import InputError


def load_graph(model: str, *, online: bool = True) -> ModelGraph:
    """The model graph of a config.json, a model folder, or a hub id. Raises InputError when there is none, or when it is torn."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        return graph_of(_read(path), path.parent.name if path.name == "config.json" else path.stem)
    for candidate in (_cached(model), _bundled(model)):
        if candidate is not None:
            return graph_of(_read(candidate), model)
    if online and model.count("/") == 1 and os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0"):
        return graph_of(_read(_downloaded(model)), model)
    raise InputError(
        "--model", model, "is no config.json, folder, or known hub id", "give a path, or an id as Qwen/Qwen3-8B"
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(
            "--model", path, f"is no readable configuration ({error})", "give the model's own config.json"
        ) from None
    if not isinstance(plain, dict):
        raise InputError("--model", path, "is no JSON object", "give the model's own config.json")
    return plain


def _cached(model: str) -> Path | None:
    """Newest snapshot in the hub's cache."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted(
        hub.glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"), key=lambda p: p.stat().st_mtime
    )
    return found[-1] if found else None


def _bundle() -> Path | None:
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "model_configs"


def _bundled(model: str) -> Path | None:
    folder = _bundle()
    path = folder / f"{model.replace('/', '--')}_config.json" if folder else None
    return path if path is not None and path.is_file() else None


def _downloaded(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the hub's client raises many kinds, and all mean the same here
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            "--model", model, f"could not be fetched ({first})", "give a config.json or a folder"
        ) from None
