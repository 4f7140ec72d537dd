"""Futures that a loop waits for, each with what is to be done with it; handled in the order in which they were answered."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Answers:
    """Used by one thread; futures may be answered from any."""

    def __init__(self) -> None:
        self._handlers: dict[Future[Any], Callable[[Future[Any]], None]] = {}
        self._done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    def expect(self, future: Future[T], handler: Callable[[Future[T]], None]) -> Future[T]:
        """Call `handler` with the future once it is answered and its turn comes."""
        self._handlers[future] = handler
        future.add_done_callback(self._done.put)
        return future

    def instead(self, future: Future[T], handler: Callable[[Future[T]], None]) -> None:
        """Another handler for one that is not handled yet."""
        self._handlers[future] = handler

    def wait(self, seconds: float) -> bool:
        """Handle what is answered, after waiting for the first; False when nothing was within that time."""
        try:
            first = self._done.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return False
        self._handle(first)
        self.take()
        return True

    def take(self) -> None:
        """Handle everything that is answered by now."""
        while not self._done.empty():
            self._handle(self._done.get())

    def _handle(self, future: Future[Any]) -> None:
        self._handlers.pop(future)(future)
