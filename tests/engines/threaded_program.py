"""A program whose import starts a thread, which no zygote may have."""

from __future__ import annotations

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
