"""What vLLM needs around it in a child: a model folder that it can read, and a loopback interface."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
from pathlib import Path

from engines.prepare.store import PACKED_FILE
from hotpass.errors import InputError
from hotpass.records.deployment import ModelRef

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def model_folder(model: ModelRef, room: str) -> str:
    """The prepared folder as links, without the file of GGUF blocks: vLLM takes every safetensors file for weights."""
    folder = Path(room, "hotpass-model")
    folder.mkdir(parents=True, exist_ok=True)
    for item in Path(model.folder).iterdir():
        target = folder / item.name
        if item.name != PACKED_FILE and not target.exists():
            target.symlink_to(item)
    return str(folder)


def refuse_unserved(model: ModelRef) -> None:
    """Raises InputError, by name, for a model that this engine cannot serve: a cut; layers that keep something else than one KV of
    every position; an encoder. What remains may still be unknown to vLLM, which then says so itself."""
    if model.layers is not None:
        raise InputError("model", model.name, "is a cut", "give the vllm engine the whole model")
    config = json.loads((Path(model.folder) / "config.json").read_text())
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True) and not config.get("layer_types")
    problem = ""
    if others:
        problem = f"has layers of type {', '.join(others)}"
    elif sliding:
        problem = f"has a sliding window of {config['sliding_window']}"
    elif config.get("kv_lora_rank"):
        problem = "has latent attention"
    elif config.get("is_encoder_decoder"):
        problem = "has an encoder"
    if problem:
        remedy = "the vllm engine serves models whose layers all keep a KV of every position; use --engine decoder"
        raise InputError("model", f"{model.name} ({model.architecture})", problem, remedy)


def raise_loopback() -> None:
    """Bring `lo` up in this process's network namespace: vLLM's group of one process wants an address, which leads nowhere else.

    Where the interface is up already, or may not be touched, nothing happens: vLLM then says what it lacks.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        if not flags & _IFF_UP:
            fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
