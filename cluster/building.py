"""What will be wanted is built before anybody asks for it, where that takes no time from an engine.

    engines load ───────────────► build after build, until they are loaded
    an engine waits for a build ► one more beside it, on the other core

Building early changes neither what is proposed nor in which order; what is foreseen wrongly costs cores, nothing else. What is not here:
who is asked for candidates (`cluster.supply`), and making anything (`engines.build`, in the builder).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait

from actors.builder import Built
from cluster.ports import BuilderPort
from hotpass.errors import MachineError
from hotpass.records.candidate import Candidate


class Foreseen:
    """Candidates to build, those that are tried first at the front."""

    def __init__(self, builder: BuilderPort, candidates: Iterable[Candidate] = (), *, at_once: int = 1) -> None:
        """`at_once`: builds that the builder carries out at a time."""
        self._builder, self._at_once = builder, at_once
        self._waiting = deque(candidates)

    def next(self) -> Future[Built] | None:
        """The next build, begun; None when nothing more is foreseen. From any thread."""
        try:
            candidate = self._waiting.popleft()
        except IndexError:
            return None
        return self._builder.submit(candidate)

    @contextlib.contextmanager
    def meanwhile(self) -> Iterator[list[Built]]:
        """Build for as long as the block lasts. At its end what is under way is waited for, since nothing may be measured beside a
        compiler, and the list has what was built. One that fails is told when the candidate is proposed."""
        built: list[Built] = []
        over = threading.Event()

        def feed() -> None:
            with contextlib.suppress(MachineError):  # a builder that is lost is told of when a candidate needs it
                while not over.is_set() and (future := self.next()) is not None:
                    wait([future])
                    if future.exception() is None:
                        built.append(future.result())

        threads = [threading.Thread(target=feed, name="builds ahead", daemon=True) for _ in range(self._at_once)]
        for thread in threads:
            thread.start()
        try:
            yield built
        finally:
            over.set()
        for thread in threads:
            thread.join()
