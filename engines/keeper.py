"""The keeper: owns the weights, and the weights that builders derived from them, in sealed memory. It outlives every candidate.

    judge ── "weights", model ──► keeper: open_weights, copy, seal, hash ──► index + descriptor
    judge ── "place", device  ──► keeper: upload into an allocation of its own ──► handle, for children to map
    judge ── "check"          ──► keeper: checksum on the device, writes what was written to again ──► names
    judge ── "derived", files ──► keeper: read safetensors, seal         ──► index + descriptor, kept by key until dropped

It runs no model and no part; derived tensors reach it as files that a builder's process wrote. On a GPU it has a CUDA context of its
own, made when it is asked to place weights there; derived weights stay in sealed CPU memory, and are copied by whoever installs them.
`Keeper` is the judge's side, `main` the process's (`python -m engines.keeper FD`).
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.launch import Launched
from engines.wire import Channel, ChannelClosed, ChannelTimeout, Message, ProtocolBroken
from hotpass.decode import from_plain
from hotpass.errors import EngineDied, MachineError
from hotpass.records.deployment import ModelRef

if TYPE_CHECKING:
    from engines.cuda.driver import Driver
    from engines.cuda.region import DeviceCheck, DeviceWeights, Region
    from engines.memory import SealedMemory

DERIVED_BYTES = 2 << 30
"""Derived weights beyond this are given back, those used least recently first."""

PACKED = "packed:"
"""Prefix of the names of GGUF blocks in the weights' memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptWeights:
    """The weights of a model as the keeper gave them to the judge."""

    memory: SealedMemory
    formats: Mapping[str, str]
    """Parameter name → GGUF format of its blocks (`packed:<name>` in the memory)."""
    sha256: str
    """Hash of the whole memory: the weights epoch."""
    phases_ms: Mapping[str, float]


class Keeper:
    """The judge's handle of a keeper process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._launched = Launched("engines.keeper", environment, limit=1 << 26)
        self._derived: OrderedDict[str, SealedMemory] = OrderedDict()
        self._weights: KeptWeights | None = None
        self.pid = self._launched.pid

    def begin_load(self, model: ModelRef) -> None:
        """Have a model's weights sealed; `finish_load` waits for them."""
        self._send("weights", {"model": model})

    def finish_load(self, timeout_seconds: float = 600.0) -> KeptWeights:
        """The weights that `begin_load` asked for. Raises MachineError."""
        reply = self._answer(timeout_seconds)
        self._weights = KeptWeights(
            memory=_memory(reply),
            formats=dict(reply.body["formats"]),
            sha256=str(reply.body["sha256"]),
            phases_ms=dict(reply.body["phases_ms"]),
        )
        return self._weights

    def place_on(self, device: str, timeout_seconds: float = 600.0) -> DeviceWeights:
        """Put the weights that are loaded into a GPU's memory, once for all children. Raises MachineError."""
        from engines.cuda.region import DeviceWeights

        return from_plain(DeviceWeights, self._ask("place", {"device": device}, timeout_seconds).body)

    def check_device(self, timeout_seconds: float = 120.0) -> DeviceCheck:
        """Whether what was placed there is as it was; what is not has been written again. Raises MachineError where that fails."""
        from engines.cuda.region import DeviceCheck

        return from_plain(DeviceCheck, self._ask("check", {}, timeout_seconds).body)

    def derived(self, files: Mapping[str, Path], timeout_seconds: float = 120.0) -> SealedMemory:
        """Derived weights from safetensors files, one a concrete slot; names are `<slot>/<tensor>`.

        Sealed once for each set of files and kept while they and later ones fit `DERIVED_BYTES`; children keep what they still map.
        The descriptor stays the keeper's: use it before the next call.
        """
        key = "|".join(f"{slot}={path}" for slot, path in sorted(files.items()))
        if key in self._derived:
            self._derived.move_to_end(key)
            return self._derived[key]
        body = {"key": key, "files": {slot: str(path) for slot, path in files.items()}}
        self._derived[key] = _memory(self._ask("derived", body, timeout_seconds))
        while len(self._derived) > 1 and self.derived_bytes > DERIVED_BYTES:
            oldest, memory = self._derived.popitem(last=False)
            memory.close()
            self._ask("forget", {"key": oldest}, 60.0)
        return self._derived[key]

    @property
    def derived_bytes(self) -> int:
        """Memory of the derived weights that are kept now."""
        return sum(memory.index.num_bytes for memory in self._derived.values())

    def hash_weights(self, timeout_seconds: float = 120.0) -> str:
        """SHA-256 over the weights' memory now."""
        return str(self._ask("hash", {}, timeout_seconds).body["sha256"])

    def alive(self) -> bool:
        return self._launched.alive()

    def close(self) -> None:
        for memory in self._derived.values():
            memory.close()
        self._derived.clear()
        if self._weights is not None:
            self._weights.memory.close()
            self._weights = None
        self._launched.close()

    def _ask(self, kind: str, body: object, timeout_seconds: float) -> Message:
        self._send(kind, body)
        return self._answer(timeout_seconds)

    def _send(self, kind: str, body: object) -> None:
        try:
            self._launched.channel.send(kind, body)
        except ChannelClosed:
            raise EngineDied(f"the keeper is gone: {self._launched.last_words()}") from None

    def _answer(self, timeout_seconds: float) -> Message:
        try:
            reply = self._launched.channel.receive(time.monotonic() + timeout_seconds)
        except (ChannelClosed, ChannelTimeout, ProtocolBroken) as error:
            raise EngineDied(
                f"the keeper does not answer ({type(error).__name__}): {self._launched.last_words()}"
            ) from None
        if reply.kind != "ok":
            raise MachineError(f"the keeper: {reply.body}")
        return reply


def _memory(reply: Message) -> SealedMemory:
    from engines.memory import MemoryIndex, SealedMemory, check_sealed

    memory = SealedMemory(fd=reply.fds[0], index=from_plain(MemoryIndex, reply.body["index"]))
    check_sealed(memory.fd, memory.index)
    return memory


class _Server:
    """The keeper's own state."""

    def __init__(self, make_driver: Callable[[str], Driver]) -> None:
        self.weights: SealedMemory | None = None
        self.derived: dict[str, SealedMemory] = {}
        self.region: Region | None = None
        self._make_driver = make_driver

    def answer(self, message: Message) -> tuple[dict[str, Any], list[int]]:
        if message.kind == "weights":
            return self._load(from_plain(ModelRef, message.body["model"]))
        if message.kind == "derived":
            files = {slot: Path(path) for slot, path in message.body["files"].items()}
            return self._derive(message.body["key"], files)
        if message.kind == "place":
            return self._place(message.body["device"]), []
        if message.kind == "check":
            return self._check(), []
        if message.kind == "hash":
            return {"sha256": self._hash()}, []
        if message.kind == "forget":
            self.derived.pop(message.body["key"]).close()
            return {}, []
        raise ValueError(f"no request {message.kind!r}")

    def _load(self, model: ModelRef) -> tuple[dict[str, Any], list[int]]:
        from engines.memory import seal
        from engines.prepare.store import open_weights

        start = time.perf_counter()
        store = open_weights(model)
        blocks = {name: found for name in store if (found := store.packed(name)) is not None}
        tensors = {**store, **{PACKED + name: tensor for name, (_, tensor) in blocks.items()}}
        self.weights = seal(tensors, "weights")
        sealed = time.perf_counter()
        digest = self._hash()
        return {
            "index": self.weights.index,
            "formats": {name: kind for name, (kind, _) in blocks.items()},
            "sha256": digest,
            "phases_ms": {"weights": (sealed - start) * 1e3, "weights_hash": (time.perf_counter() - sealed) * 1e3},
        }, [self.weights.fd]

    def _place(self, device: str) -> Any:
        from engines.cuda.region import Region, device_index
        from engines.memory import attach

        if self.weights is None:
            raise ValueError("no weights are loaded")
        if self.region is not None:
            raise ValueError("the weights are on a device already")
        index = device_index(self.weights.index, leave_out=PACKED)
        self.region = Region(attach(self.weights), index, self._make_driver(device))
        return self.region.weights

    def _check(self) -> Any:
        if self.region is None:
            raise ValueError("no weights are on a device")
        return self.region.check()

    def _derive(self, key: str, files: Mapping[str, Path]) -> tuple[dict[str, Any], list[int]]:
        from safetensors.torch import load_file

        from engines.memory import seal

        tensors = {f"{slot}/{name}": tensor for slot, path in files.items() for name, tensor in load_file(path).items()}
        memory = seal(tensors, "derived")
        self.derived[key] = memory
        return {"index": memory.index}, [memory.fd]

    def _hash(self) -> str:
        from engines.memory import sha256_of

        if self.weights is None:
            raise ValueError("no weights are loaded")
        return sha256_of(self.weights.fd, self.weights.index.num_bytes)


def serve(channel: Channel, make_driver: Callable[[str], Driver] | None = None) -> None:
    """Answer until the judge closes. A request that fails is answered with its error; the keeper lives on.

    `make_driver`: of a device; by default `CudaDriver`, imported when it is needed.
    """
    server = _Server(make_driver or _cuda_driver)
    while True:
        try:
            message = channel.receive()
        except ChannelClosed:
            return
        try:
            body, fds = server.answer(message)
            channel.send("ok", body, fds=fds)
        except ChannelClosed:
            return
        except Exception as error:  # safetensors and torch raise types of their own
            channel.send("error", f"{type(error).__name__}: {error}"[:2000])


def _cuda_driver(device: str) -> Driver:
    from engines.cuda.driver import CudaDriver

    return CudaDriver(device)


def main() -> None:
    """`python -m engines.keeper FD`."""
    import socket

    serve(Channel(socket.socket(fileno=int(sys.argv[1])), limit=1 << 28, accepts_fds=True))


if __name__ == "__main__":
    main()
