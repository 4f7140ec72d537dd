"""Imports run downward, and each heavy library stays in its room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ["hotpass", "engines", "costmodel", "search", "verification", "actors", "cluster"]
"""From the ground up."""

ALLOWED = {
    "torch": ("engines/", "verification/"),
    "transformers": ("engines/",),
    "triton": ("engines/",),
    "vllm": ("engines/",),
    "pynvml": ("engines/",),
    "gguf": ("engines/",),
    "optuna": ("search/",),
    "litellm": ("search/",),
    "mlflow": ("cluster/ledger.py",),
    "mcp": ("cluster/commands/mcp.py",),
    "ray": ("actors/", "cluster/"),
}
"""Library → where it may be imported."""

GROUND_HEAVY = ("pandas", "pyarrow", "matplotlib", "rich")
"""The ground may import these inside functions only."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            # Parts are sources that engines execute; the public API resolves upward by string and is exempt.
            is_part = relative.startswith("search/catalogue/") and relative.count("/") > 2
            if not is_part and relative != "hotpass/__init__.py":
                yield relative, ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno


def test_rooms_import_downward_only() -> None:
    upward = []
    for path, tree in modules():
        height = ROOMS.index(path.split("/")[0])
        for name, line in imported(tree):
            room = name.split(".")[0]
            if room in ROOMS and ROOMS.index(room) > height:
                upward.append(f"{path}:{line} imports {name}")
    assert upward == []


def test_libraries_stay_in_their_rooms() -> None:
    astray = []
    for path, tree in modules():
        for name, line in imported(tree):
            homes = ALLOWED.get(name.split(".")[0])
            if homes is not None and not any(path.startswith(home) for home in homes):
                astray.append(f"{path}:{line} imports {name}")
    assert astray == []


def test_no_import_is_relative() -> None:
    relative = [
        f"{path}:{node.lineno}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_the_ground_is_light() -> None:
    heavy = []
    for path, tree in modules():
        if path.startswith("hotpass/") and not path.endswith("render.py"):
            for node in tree.body:
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                heavy += [f"{path}:{node.lineno} {n}" for n in names if n.split(".")[0] in GROUND_HEAVY]
    assert heavy == []


def test_files_can_be_read_in_one_sitting() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {lines}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 600
    ]
    assert long == []
