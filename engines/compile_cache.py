"""Folders in which the compilers of a candidate (inductor, Triton) keep what they make, and look for what was made before.

    <folder>/torchinductor, <folder>/triton, <folder>/torch        one folder a candidate, never another's

A folder that a builder filled is read-only; the compilers want to write locks and temporary files beside what they find. So a child gets
folders of its own with links to the builder's files (`linked`): what it loads are the very bytes that were hashed. What is not here:
filling a folder (`engines.build_compile`), and compiling (`engines.decoder.compile`).
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
MANIFEST = "manifest.json"
"""Of a builder's folder: `{"files": {relative path: SHA-256}}`, every file but itself."""
ROOT_VARIABLE = "HOTPASS_COMPILE_CACHE"


def cache_folder(candidate_id: str) -> Path:
    """Where a candidate's compiled code lies: under HOTPASS_COMPILE_CACHE, else in this user's temporary folder."""
    root = os.environ.get(ROOT_VARIABLE) or f"{tempfile.gettempdir()}/hotpass-{os.getuid()}/compile"
    return Path(root) / candidate_id[:16]


def variables(folder: Path) -> dict[str, str]:
    """The environment that sends the compilers there."""
    return {name: str(folder / room_of(name)) for name in CACHE_VARIABLES}


def room_of(variable: str) -> str:
    """Name of a compiler's folder within a candidate's."""
    return variable.split("_")[0].lower()


def linked(compiled: Path) -> Path:
    """A new writable folder that shows the files of a builder's manifest by links. Made anew for each install, under a name that nobody
    could know before, so that no earlier candidate of the process has put anything into it."""
    made = Path(tempfile.mkdtemp(prefix="hotpass-compiled-"))
    for name in json.loads((compiled / MANIFEST).read_text())["files"]:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).symlink_to(compiled / name)
    return made
