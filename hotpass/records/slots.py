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

    def matching(self, claim: str) -> tuple[Slot, ...]:
        """Slots that a claim pattern names; `*` stands for one path component."""
        return tuple(slot for slot in self.slots if claim_matches(claim, slot.name))


def claim_matches(claim: str, slot: str) -> bool:
    """True when the pattern names this very slot: same depth, each component matches (`*` within one component)."""
    wanted, given = claim.split("."), slot.split(".")
    return len(wanted) == len(given) and all(fnmatchcase(g, w) for w, g in zip(wanted, given, strict=True))


def covered_slots(table: SlotTable, claims: Sequence[str], keeps: Sequence[str]) -> frozenset[str]:
    """Concrete slots under the claims except the kept children. Claiming `model` covers every slot.

    `keeps` are paths relative to the claimed slot (`self_attn`), whose subtrees stay with the engine.
    """
    covered: set[str] = set()
    for claim in claims:
        for root in table.matching(claim):
            kept = [f"{root.name}.{child}" for child in keeps]
            for name in table.names():
                inside = root.name == "model" or name == root.name or name.startswith(root.name + ".")
                if inside and not any(name == k or name.startswith(k + ".") for k in kept):
                    covered.add(name)
    return frozenset(covered)
