"""Whether a child is as it was born, after a candidate was taken out: what the program says, and what the kernel says.

The program's fingerprint can be forged by code that stayed behind; where memory is mapped and how many threads live is read from
/proc, out of the child's reach. Weights lie in sealed memory, so that a mapping that is where it was holds what it held; those in a
GPU's memory the keeper looks at (`engines.cuda.region`).
"""

from __future__ import annotations

from collections.abc import Mapping

from engines.program import Fingerprint
from engines.stable import PairChild, Stable

MEMORY_MARGIN_BYTES = 1 << 29
"""Growth of a child's resident memory since birth beyond which it counts as residue."""

DEVICE_MARGIN_BYTES = 8 << 20
"""The same of a GPU's memory, where nothing is kept that was given back: a few of the allocator's smallest blocks."""


def differences(birth: Fingerprint, now: Fingerprint) -> list[str]:
    """What changed, each as a short sentence."""
    found = []
    other = [name for name, digest in now.probes.items() if birth.probes.get(name) != digest]
    if other or not now.probes:
        found.append(f"the baseline no longer computes what it did at birth ({', '.join(other) or 'no answer'})")
    found += _changed(birth.flags, now.flags)
    if now.threads_alive > birth.threads_alive:
        found.append(f"threads {birth.threads_alive} -> {now.threads_alive}")
    if now.children_alive > birth.children_alive:
        found.append(f"{now.children_alive - birth.children_alive} processes left behind")
    if now.open_files > birth.open_files:
        found.append(f"open files {birth.open_files} -> {now.open_files}")
    if now.resident_bytes > birth.resident_bytes + MEMORY_MARGIN_BYTES:
        found.append(f"resident memory grew by {(now.resident_bytes - birth.resident_bytes) >> 20} MiB")
    if now.device_bytes > birth.device_bytes + DEVICE_MARGIN_BYTES:
        found.append(f"device memory grew by {(now.device_bytes - birth.device_bytes) >> 20} MiB")
    return found


def changed_while_installed(birth: Fingerprint, now: Mapping[str, str]) -> list[str]:
    """What a candidate changed for others for as long as it was there. `now` has fewer names than the flags at birth."""
    known = {name: birth.flags[name] for name in now if name in birth.flags}
    return [f"while it was installed: {change}" for change in _changed(known, now)]


def weights_moved(stable: Stable, pair: PairChild) -> bool:
    """True when the child no longer maps the weights where, and as, it did at birth."""
    return pair.child.mappings([stable.weights.memory.inode]) != pair.mappings


def _changed(birth: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = sorted(birth.keys() | now.keys())
    return [
        f"{name} {birth.get(name, 'absent')[:40]} -> {now.get(name, 'absent')[:40]}"
        for name in names
        if birth.get(name) != now.get(name)
    ]
