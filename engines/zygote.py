"""The zygote: has imported everything that children need, and does nothing else. Children are forked from it.

    judge ── "prepare", modules ──► imports
    judge ── "fork", [socket, output] ──► fork; the child answers on its own socket ──► "forked" with pid and pidfd
    judge ◄── "ended", pid, status ── the zygote reaps, ends what the child left behind, removes its folder

No tensor operation, no thread, no CUDA happens here: one matrix product before a fork leaves the child with a thread pool whose
threads do not exist, and its first product hangs. `Zygote` is the judge's side, `main` the process's (`python -m engines.zygote FD`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engines.confine import confine
from engines.cuda.forks import is_initialised
from engines.held_folder import ENGINE, remove_if_abandoned
from engines.launch import Launched
from engines.limits import (
    CappedOutput,
    ChildLimits,
    adopt_orphans,
    apply_limits,
    close_other_files,
    die_with_parent,
    leave_network,
    output_file,
    replace_environment,
    reset_signals,
)
from engines.processes import WATCH_MS, PidsGroup, Watch, ceiling
from engines.wire import (
    REPLY_LIMIT,
    REQUEST_LIMIT,
    Channel,
    ChannelClosed,
    ChannelTimeout,
    Message,
    ProtocolBroken,
    channel_pair,
    close_all,
)
from hotpass.decode import from_plain
from hotpass.errors import EngineDied, MachineError

PARENT_CHECK_MS = 5000
"""How often an idle zygote looks whether its judge still lives (a forked copy of the judge may hold the socket open)."""

LAST_LOOK_SECONDS = 0.03
"""So long a zygote whose socket has closed waits for its judge to have ended; the next engine's start does the same as it then does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forked:
    """A new child, as the judge gets it."""

    pid: int
    pidfd: int
    channel: Channel
    output_fd: int
    """Memory file with what the child writes to stdout and stderr."""
    fork_ms: float


class Zygote:
    """The judge's handle of a zygote process."""

    def __init__(self, environment: dict[str, str], python: str = "") -> None:
        """`python`: an interpreter of another environment, for children that need its libraries."""
        self._launched = Launched("engines.zygote", environment, limit=REPLY_LIMIT, python=python)
        self._ended: dict[int, int] = {}
        self.pid = self._launched.pid

    def prepare(
        self, required: Sequence[str], optional: Sequence[str] = (), timeout_seconds: float = 180.0
    ) -> dict[str, float]:
        """Import modules. Returns ms by phase. Raises MachineError when a required one cannot be imported."""
        body = {"required": list(required), "optional": list(optional)}
        reply = self._ask("prepare", body, (), timeout_seconds)
        if reply.kind == "error":
            raise MachineError(f"the engine's processes cannot be prepared: {reply.body}")
        return dict(reply.body)

    def fork(self, program: str, limits: ChildLimits, timeout_seconds: float = 30.0) -> Forked:
        """A new child that runs the program (`package.module:Class`)."""
        start = time.perf_counter()
        ours, theirs = channel_pair(parent_limit=REPLY_LIMIT, parent_accepts_fds=True, child_limit=REQUEST_LIMIT)
        output = output_file(limits.output_bytes)
        try:
            reply = self._ask(
                "fork", {"program": program, "limits": limits}, (theirs.fileno(), output), timeout_seconds
            )
            if reply.kind != "forked":
                raise MachineError(f"the zygote cannot fork: {reply.body}")
        except BaseException:
            ours.close()
            os.close(output)
            raise
        finally:
            theirs.close()
        return Forked(
            pid=int(reply.body["pid"]),
            pidfd=reply.fds[0],
            channel=ours,
            output_fd=output,
            fork_ms=(time.perf_counter() - start) * 1e3,
        )

    def end(self, pid: int, timeout_seconds: float = 30.0) -> int:
        """Kill a child's group and everything it left behind; its wait status (as `os.waitpid` gives it)."""
        if pid not in self._ended:
            self._send("end", {"pid": pid})
        return self.status(pid, timeout_seconds)

    def status(self, pid: int, timeout_seconds: float = 30.0) -> int:
        """Wait status of a child that has ended or is about to."""
        deadline = time.monotonic() + timeout_seconds
        while pid not in self._ended:
            self._note(self._receive(deadline))
        return self._ended.pop(pid)

    def alive(self) -> bool:
        return self._launched.alive()

    def close(self) -> None:
        """End the zygote; it takes its children with it."""
        self._launched.close()

    def _ask(self, kind: str, body: object, fds: Sequence[int], timeout_seconds: float) -> Message:
        self._send(kind, body, fds)
        deadline = time.monotonic() + timeout_seconds
        while (message := self._receive(deadline)).kind == "ended":
            self._note(message)
        return message

    def _send(self, kind: str, body: object, fds: Sequence[int] = ()) -> None:
        try:
            self._launched.channel.send(kind, body, fds=fds)
        except ChannelClosed:
            raise EngineDied(f"the zygote is gone: {self._launched.last_words()}") from None

    def _receive(self, deadline: float) -> Message:
        try:
            return self._launched.channel.receive(deadline)
        except (ChannelClosed, ChannelTimeout, ProtocolBroken) as error:
            words = self._launched.last_words()
            raise EngineDied(f"the zygote does not answer ({type(error).__name__}): {words}") from None

    def _note(self, message: Message) -> None:
        self._ended[int(message.body["pid"])] = int(message.body["status"])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Child:
    pidfd: int
    folder: Path
    group: PidsGroup | None
    watch: Watch | None
    """Where nothing else limits the number of its processes."""


class _Server:
    """The zygote's own state; one loop, no thread."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.judge = os.getppid()
        self.children: dict[int, _Child] = {}

    def run(self) -> None:
        adopt_orphans()
        try:
            while os.getppid() == self.judge:
                for fd in self._ready():
                    if fd == self.channel.fileno():
                        self._answer(self.channel.receive())
                    else:
                        self._reap(next(pid for pid, child in self.children.items() if child.pidfd == fd))
        except ChannelClosed:
            pass
        finally:
            for pid in list(self.children):
                self._reap(pid, report=False)
            _remove_folder_of_the_dead(self.judge)

    def _ready(self) -> list[int]:
        poll = select.poll()
        for fd in [self.channel.fileno(), *(child.pidfd for child in self.children.values())]:
            poll.register(fd, select.POLLIN)
        watched = [(pid, child) for pid, child in self.children.items() if child.watch is not None]
        ready = [fd for fd, _ in poll.poll(WATCH_MS if watched else PARENT_CHECK_MS)]
        for pid, child in watched:
            if child.watch is not None and child.watch.has_too_many(pid, self.children):
                _kill(partial(os.killpg, pid, signal.SIGKILL))  # its end is told as any other's
                _kill(partial(signal.pidfd_send_signal, child.pidfd, signal.SIGKILL))
        return ready

    def _answer(self, message: Message) -> None:
        if message.kind == "prepare":
            self._prepare(message.body["required"], message.body["optional"])
        elif message.kind == "fork":
            self._fork(message)
        elif message.kind == "end":
            self._reap(int(message.body["pid"]))
        else:
            self.channel.send("error", f"no request {message.kind!r}")

    def _prepare(self, required: list[str], optional: list[str]) -> None:
        start = time.perf_counter()
        for name in [*required, *optional]:
            try:
                importlib.import_module(name)
            except Exception as error:  # a foreign module may raise anything
                if name in required:
                    self.channel.send("error", f"import {name}: {type(error).__name__}: {error}")
                    return
        # What is alive now stays for ever: frozen, it is not touched by a child's collector, and its pages stay shared.
        gc.collect()
        gc.freeze()
        threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
        if is_initialised():
            self.channel.send("error", "an import initialised CUDA, a forked child could not use it")
            return
        if len(threads) != 1:
            self.channel.send("error", f"an import started threads, a fork would hang: {threads}")
            return
        self.channel.send("ok", {"import": (time.perf_counter() - start) * 1e3})

    def _fork(self, message: Message) -> None:
        limits = from_plain(ChildLimits, message.body["limits"])
        folder = Path(tempfile.mkdtemp(prefix="hotpass-child-"))
        zygote, group = os.getpid(), PidsGroup.new(limits.extra_processes)
        try:
            pid = os.fork()
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if group is not None:
                group.remove()
            close_all(message.fds)
            self.channel.send("error", str(error))
            return
        if pid == 0:
            _become_child(zygote, message.body["program"], limits, folder, group, *message.fds)
        close_all(message.fds)
        pidfd = os.pidfd_open(pid)
        watch = Watch(limits.extra_processes) if group is None and os.getuid() == 0 else None
        self.children[pid] = _Child(pidfd=pidfd, folder=folder, group=group, watch=watch)
        self.channel.send("forked", {"pid": pid}, fds=[pidfd])

    def _reap(self, pid: int, *, report: bool = True) -> None:
        child = self.children.pop(pid, None)
        if child is None:
            return  # it ended by itself meanwhile and was reported
        _kill(partial(os.killpg, pid, signal.SIGKILL))
        _kill(partial(signal.pidfd_send_signal, child.pidfd, signal.SIGKILL))
        if child.group is not None:
            child.group.end()
        _, status = os.waitpid(pid, 0)
        os.close(child.pidfd)
        self._end_orphans()
        if child.group is not None:
            child.group.remove()
        shutil.rmtree(child.folder, ignore_errors=True)
        if report:
            self.channel.send("ended", {"pid": pid, "status": status})

    def _end_orphans(self) -> None:
        """Processes that a child started and that left its group have become children of this one: none of them may stay."""
        while True:
            own = {int(pid) for pid in Path("/proc/self/task", str(os.getpid()), "children").read_text().split()}
            orphans = own - self.children.keys()
            if not orphans:
                return
            for pid in orphans:
                _kill(partial(os.kill, pid, signal.SIGKILL))
            for pid in orphans:
                os.waitpid(pid, 0)


def _remove_folder_of_the_dead(judge: int) -> None:
    """The engine's folder, where its judge was killed: the kernel drops that one's lock before it has ended."""
    folder = Path(tempfile.gettempdir())
    end = time.monotonic() + LAST_LOOK_SECONDS
    while folder.name.startswith(ENGINE) and os.getppid() == judge and time.monotonic() < end:
        time.sleep(0.002)
    if folder.name.startswith(ENGINE):
        remove_if_abandoned(folder)


def _kill(action: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended by itself
        action()


def _become_child(
    zygote: int, program: str, limits: ChildLimits, folder: Path, group: PidsGroup | None, sock: int, output: int
) -> None:
    """From the fork to the program's loop. Never returns."""
    status = 70
    try:
        if group is not None:
            group.enter()
        os.setsid()
        die_with_parent(zygote)
        reset_signals()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        close_other_files([0, 1, 2, sock])
        sys.stdout, sys.stderr = CappedOutput(sys.__stdout__), CappedOutput(sys.__stderr__)  # type: ignore[arg-type]
        os.chdir(folder)
        replace_environment({**os.environ, **_home(folder)})
        facts = {
            "network": "open" if limits.network else leave_network() or "none",
            "processes": ceiling(group, limits.extra_processes),
            "unconfined": (confine(folder) or "nothing") if limits.confined else "files, memory, signals",
        }
        apply_limits(limits)
        from engines.child import run_child

        run_child(Channel(socket.socket(fileno=sock), limit=REQUEST_LIMIT, accepts_fds=True), program, facts)
        status = 0
    except BaseException:  # whatever it was, it must not run the zygote's code above the fork
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _home(folder: Path) -> Mapping[str, str]:
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "XDG_CACHE_HOME": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }


def main() -> None:
    """`python -m engines.zygote FD`."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), limit=REQUEST_LIMIT, accepts_fds=True)
    _Server(channel).run()


if __name__ == "__main__":
    main()
