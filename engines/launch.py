"""Start a keeper or a zygote as a program of its own (exec, never a fork of the caller), joined to it by a socket pair.

Both end when the caller's end of the socket closes, however the caller ended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import IO

from engines.wire import channel_pair


class Launched:
    """A process that runs `python -m MODULE FD`, and the channel to it."""

    def __init__(self, module: str, environment: dict[str, str], *, limit: int, python: str = "") -> None:
        """`python`: an interpreter of another environment; this one's by default."""
        self.channel, theirs = channel_pair(parent_limit=limit, parent_accepts_fds=True, child_limit=1 << 28)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has died)
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, "-m", module, str(theirs.fileno())],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.pid = self._process.pid

    def last_words(self) -> str:
        """What the process wrote last; for the error message when it died."""
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - 2000))
        return self._log.read().decode(errors="replace").strip()

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Close the channel, which ends the process; kill it if it has not ended by then."""
        self.channel.close()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
