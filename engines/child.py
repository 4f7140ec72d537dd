"""The child: runs one program for a judge, one request after another, until the socket closes or it is killed.

    judge ── request ──► method of the Program ──► "ok" with the reply, or "failed" with a Failure

Everything that a candidate may do wrong happens here; what can still be caught becomes a `Failure`, the rest ends the process and
the judge sees how. The child keeps no clock of record: the times that it reports are only compared with the judge's.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from engines.program import (
    Artefacts,
    CandidateFailed,
    ImagedProgram,
    KvPlan,
    ProfiledProgram,
    Program,
    ReplayReply,
    ReplayRequest,
    StepEvent,
    WindowInputs,
)
from engines.wire import Channel, ChannelClosed, Message, close_all
from hotpass.decode import from_plain
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import Failure, FailureKind

if TYPE_CHECKING:
    import torch

DETAIL_LIMIT = 4000
"""Characters of a traceback that travel."""

Reply = tuple[Any, list[int]]
"""Body and descriptors of an answer."""


def run_child(channel: Channel, program: str, facts: Mapping[str, str]) -> None:
    """Serve requests. `program` is `package.module:Class`. Returns when the judge closes."""
    tempfile.tempdir = os.environ["TMPDIR"]  # the zygote may have asked for it before the fork
    server = _Server(channel, _new_program(program))
    channel.send("hello", {"pid": os.getpid(), **facts})
    while True:
        try:
            message = channel.receive()
        except ChannelClosed:
            return
        try:
            body, fds = server.answer(message)
            reply, kind = body, "ok"
        except ChannelClosed:
            return
        except BaseException as error:  # sys.exit and KeyboardInterrupt of a candidate are its failures, too
            reply, kind, fds = failure_of(error), "failed", []
        close_all(message.fds)
        channel.send(kind, reply, fds=fds)
        close_all(fds)


def failure_of(error: BaseException) -> Failure:
    """The record of what a candidate raised. Never raises, whatever the exception does when it is printed."""
    if isinstance(error, CandidateFailed):
        return error.failure
    try:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        detail = "".join(traceback.format_exception(error))[-DETAIL_LIMIT:]
    except BaseException:
        text, detail = f"{type(error).__name__} that cannot be printed", ""
    memory = isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text.lower()
    return Failure(kind=FailureKind.MEMORY if memory else FailureKind.EXCEPTION, message=text, detail=detail)


def _new_program(dotted: str) -> Program:
    module, _, name = dotted.partition(":")
    program: Program = getattr(importlib.import_module(module), name)()
    return program


class _Server:
    """The requests, each named as the method of the Program that it calls."""

    def __init__(self, channel: Channel, program: Program) -> None:
        self._channel = channel
        self._program = program
        self._out: torch.Tensor | None = None
        self._weights_from = ""
        """Where the program's weights lie, in words."""
        self._contexts: dict[tuple[int, int], torch.Tensor] = {}
        """(cut, sequence) → the longest context that any row has for that sequence of it."""
        self._handlers: dict[str, Callable[[Message], Reply]] = {
            "load": self._load,
            "weights_from": lambda message: (self._weights_from, []),
            "slots": lambda message: (self._program.slots(), []),
            "part_template": self._part_template,
            "install": self._install,
            "install_baseline": self._install_baseline,
            "uninstall": self._uninstall,
            "compute_contexts": self._compute_contexts,
            "keep_contexts": self._keep_contexts,
            "image_contexts": self._image_contexts,
            "keep_image": self._keep_image,
            "load_contexts": self._load_contexts,
            "window": self._window,
            "replay": self._replay,
            "generate": self._generate,
            "score": self._score,
            "answer_from_kv": self._answer_from_kv,
            "logits_at": self._logits_at,
            "profile": self._profile,
            "state": lambda message: (dict(self._program.state()), []),
            "fingerprint": lambda message: (self._program.fingerprint(message.body["whole"]), []),
        }

    def answer(self, message: Message) -> Reply:
        return self._handlers[message.kind](message)

    def _load(self, message: Message) -> Reply:
        from engines.keeper import PACKED
        from engines.memory import MemoryIndex, SealedMemory, attach, map_buffer
        from engines.prepare.store import WeightStore

        body = message.body
        self._out = map_buffer(message.fds[1])
        tensors = attach(SealedMemory(fd=message.fds[0], index=from_plain(MemoryIndex, body["index"])))
        packed = {name: (kind, tensors[PACKED + name]) for name, kind in body["formats"].items()}
        values = {name: tensor for name, tensor in tensors.items() if not name.startswith(PACKED)}
        self._weights_from = "sealed memory"
        if body["on_device"] is not None:
            values, self._weights_from = _mapped_on_device(values, body["on_device"], body["device"])
        phases = self._program.load(
            from_plain(ModelRef, body["model"]),
            WeightStore(values, packed, body["epoch"]),
            [tuple(cut) for cut in body["cuts"]],
            body["device"],
            body["threads"],
            from_plain(KvPlan, body["plan"]),
        )
        return phases, []

    def _install(self, message: Message) -> Reply:
        body = message.body
        derived = _derived(body["derived"], message.fds)
        artefacts = Artefacts(native=tuple(body["native"]), derived=derived, compiled=body["compiled"])
        candidate = from_plain(Candidate, body["candidate"])
        return self._program.install(body["side"], candidate, artefacts, body["cut"], body["rows"]), []

    def _part_template(self, message: Message) -> Reply:
        """For programs whose tree only a child can look at."""
        template: Callable[[str], str] = self._program.part_template  # type: ignore[attr-defined]
        return template(message.body["slot"]), []

    def _install_baseline(self, message: Message) -> Reply:
        install: Callable[[str, str, int], Any] = self._program.install_baseline  # type: ignore[attr-defined]
        return install(message.body["side"], message.body["name"], message.body["cut"]), []

    def _uninstall(self, message: Message) -> Reply:
        self._program.uninstall(message.body["side"])
        return None, []

    def _compute_contexts(self, message: Message) -> Reply:
        from engines.memory import seal

        tokens = _split(_tokens(message.blob), message.body["lengths"])
        contexts = self._program.compute_contexts(message.body["cut"], message.body["row"], tokens)
        memory = seal({str(index): context for index, context in enumerate(contexts)}, "context")
        return {"index": memory.index}, [memory.fd]

    def _keep_contexts(self, message: Message) -> Reply:
        from engines.memory import MemoryIndex, SealedMemory, attach

        mapped = attach(SealedMemory(fd=message.fds[0], index=from_plain(MemoryIndex, message.body["index"])))
        for sequence in message.body["sequences"]:
            self._contexts[message.body["cut"], sequence] = mapped[str(sequence)]
        return None, []

    def _image_contexts(self, message: Message) -> Reply:
        """Of all rows; without a descriptor where there can be none."""
        body, program = message.body, self._program
        if not isinstance(program, ImagedProgram):
            return None, []
        contexts = {
            row: [_start(self._contexts[body["cut"], i], length) for i, length in enumerate(lengths)]
            for row, lengths in body["rows"]
        }
        fd = program.context_image(body["cut"], contexts)
        return None, [] if fd is None else [fd]

    def _keep_image(self, message: Message) -> Reply:
        if isinstance(self._program, ImagedProgram):  # others copy, though the reference's program made an image
            self._program.keep_image(message.body["cut"], os.dup(message.fds[0]))
        return None, []

    def _load_contexts(self, message: Message) -> Reply:
        body, program = message.body, self._program
        if isinstance(program, ImagedProgram) and program.cover(body["side"], body["cut"]):
            return None, []
        for row, lengths in body["rows"]:
            contexts = [_start(self._contexts[body["cut"], i], length) for i, length in enumerate(lengths)]
            self._program.load_contexts(body["side"], body["cut"], row, contexts)
        return None, []

    def _window(self, message: Message) -> Reply:
        body, out = message.body, self._out
        assert out is not None, "loaded before any window"
        steps, num_seqs, vocab = body["shape"]
        view = out[: steps * num_seqs * vocab].view(steps, num_seqs, vocab)
        inputs = WindowInputs(tokens=_tokens(message.blob).view(steps, -1), nonce=body["nonce"])
        reply = self._program.run_window(body["side"], body["cut"], body["row"], inputs, view)
        return replace(reply, echo=self._program.echo(body["side"], body["cut"])), []

    def _replay(self, message: Message) -> Reply:
        body = message.body
        prompts = _split(_tokens(message.blob), [item["length"] for item in body["requests"]])
        requests = [
            ReplayRequest(request_id=item["id"], tokens=tuple(prompt.tolist()), output_tokens=item["output_tokens"])
            for item, prompt in zip(body["requests"], prompts, strict=True)
        ]

        def emit(event: StepEvent) -> None:
            self._channel.send("step", event)

        counts = dict(self._program.replay(body["side"], requests, body["concurrency"], emit))
        return ReplayReply(activation=counts, echo=self._program.echo(body["side"], None)), []

    def _generate(self, message: Message) -> Reply:
        prompts = [prompt.tolist() for prompt in _split(_tokens(message.blob), message.body["lengths"])]
        return self._program.generate(message.body["side"], prompts, message.body["max_tokens"]), []

    def _answer_from_kv(self, message: Message) -> Reply:
        body, tokens, out = message.body, _tokens(message.blob).tolist(), self._out
        assert out is not None, "loaded before any window"
        view = out[: len(tokens) * body["vocab"]].view(1, len(tokens), body["vocab"])
        return self._program.answer_from_kv(body["side"], body["cut"], body["row"], tokens, view), []

    def _logits_at(self, message: Message) -> Reply:
        from engines.memory import map_buffer

        body, positions = message.body, message.body["positions"]
        view = map_buffer(message.fds[0])[: len(positions) * body["vocab"]].view(len(positions), body["vocab"])
        self._program.logits_at(body["side"], body["cut"], _tokens(message.blob).tolist(), positions, view)
        return None, []

    def _profile(self, message: Message) -> Reply:
        """Figures, and the trace as a memory file; for programs that can be profiled."""
        from engines.memory import file_of

        body = message.body
        tokens = _tokens(message.blob).view(body["steps"], -1)
        program = cast(ProfiledProgram, self._program)
        figures, trace = program.profile(body["side"], body["cut"], body["row"], body["slots"], tokens)
        return figures, [file_of(trace, "trace")]

    def _score(self, message: Message) -> Reply:
        from engines.memory import map_buffer

        body = message.body
        tokens = _tokens(message.blob).tolist()
        out = map_buffer(message.fds[0])[: len(tokens) * body["vocab"]].view(len(tokens), body["vocab"])
        self._program.score(body["side"], body["cut"], tokens, out)
        return self._program.echo(body["side"], body["cut"]), []


def _mapped_on_device(
    sealed: dict[str, torch.Tensor], on_device: Any, device: str
) -> tuple[dict[str, torch.Tensor], str]:
    """The keeper's weights on the device, and in words where they lie: where they cannot be mapped, the sealed ones, for the program to
    copy. A namespace of its own may be the reason (`docs/engine-guarantees.md`), and a copy costs memory and time, but no truth."""
    from engines.cuda.driver import CudaDriver, DriverError
    from engines.cuda.region import DeviceWeights, map_weights

    try:
        return map_weights(from_plain(DeviceWeights, on_device), CudaDriver(device)), "the keeper's device memory"
    except DriverError as error:
        return sealed, f"a copy of this child's own ({error})"


def _derived(
    entries: list[dict[str, Any]], fds: tuple[int, ...]
) -> tuple[Mapping[str, Mapping[str, torch.Tensor]], ...]:
    """One mapping a part: concrete slot → name → tensor, over the keeper's memory. `fd` is a place among `fds`, or -1 for none."""
    from engines.memory import MemoryIndex, SealedMemory, attach

    parts: list[Mapping[str, Mapping[str, torch.Tensor]]] = []
    for entry in entries:
        slots: dict[str, dict[str, torch.Tensor]] = {slot: {} for slot in entry["slots"]}
        if entry["fd"] >= 0:
            memory = SealedMemory(fd=fds[entry["fd"]], index=from_plain(MemoryIndex, entry["index"]))
            for name, tensor in attach(memory).items():
                slot, _, tensor_name = name.partition("/")
                slots[slot][tensor_name] = tensor
        parts.append(slots)
    return tuple(parts)


def _start(context: torch.Tensor, length: int) -> torch.Tensor:
    """The first tokens of a context: of KV [layers, 2, kv_heads, context, head_dim], or of token ids [context]."""
    return context[:length] if context.dim() == 1 else context[:, :, :, :length]


def _tokens(blob: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(blob), dtype=torch.int64) if blob else torch.empty(0, dtype=torch.int64)


def _split(tokens: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    import torch

    return list(torch.split(tokens, lengths))
