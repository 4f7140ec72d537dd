"""The slot table that an engine publishes, and which slots a part covers there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hotpass.records.measurement import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A named place where an engine lets code be replaced."""

    name: str
    """`model` (the whole forward) or a module path, as `model.layers.3.mlp`."""
    stands_for: str
    """Class name that it holds, as `LlamaMLP`; `model` stands for `forward`."""
    signature: str
    """Of `forward`, as text."""
    reference_sha256: str
    """Hash of the reference source."""
    lowest_tier: Tier
    """The cheapest tier that can judge a replacement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotTable:
    """All slots of one engine with one model."""

    engine: str
    version: str
    """Of the table: engine kind, library version and architecture."""
    slots: tuple[Slot, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)

    def matching(self, claim: str, replaces: str = "") -> tuple[Slot, ...]:
        """Slots that a claim pattern names; `*` stands for one path component, `**` for any number. A claim with `**` names, of a
        part that `replaces` a class, the slots of that class alone."""
        deep = bool(replaces) and ANY_DEPTH in claim.split(".")
        named = (slot for slot in self.slots if claim_matches(claim, slot.name))
        return tuple(slot for slot in named if not deep or slot.stands_for == replaces)


ANY_DEPTH = "**"


def claim_matches(claim: str, slot: str) -> bool:
    """True when the pattern names this very slot: same depth, each component matches (`*` within one component). `**` stands for any
    number of components, and never for the whole `model`."""
    wanted, given = claim.split("."), slot.split(".")
    if ANY_DEPTH in wanted:
        return slot != "model" and _matches_deep(wanted, given)
    return len(wanted) == len(given) and all(fnmatchcase(g, w) for w, g in zip(wanted, given, strict=True))


def _matches_deep(wanted: Sequence[str], given: Sequence[str]) -> bool:
    if not wanted:
        return not given
    if wanted[0] == ANY_DEPTH:
        return any(_matches_deep(wanted[1:], given[start:]) for start in range(len(given) + 1))
    return bool(given) and fnmatchcase(given[0], wanted[0]) and _matches_deep(wanted[1:], given[1:])


def covered_slots(table: SlotTable, claims: Sequence[str], keeps: Sequence[str], replaces: str = "") -> frozenset[str]:
    """Concrete slots under the claims except the kept children. Claiming `model` covers every slot.

    `keeps` are paths relative to the claimed slot (`self_attn`), whose subtrees stay with the engine. `replaces`: as in `matching`.
    """
    covered: set[str] = set()
    for claim in claims:
        for root in table.matching(claim, replaces):
            kept = [f"{root.name}.{child}" for child in keeps]
            for name in table.names():
                inside = root.name == "model" or name == root.name or name.startswith(root.name + ".")
                if inside and not any(name == k or name.startswith(k + ".") for k in kept):
                    covered.add(name)
    return frozenset(covered)
