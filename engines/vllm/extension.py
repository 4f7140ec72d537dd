"""The worker extension: how parts reach vLLM's worker, by named methods and plain data only.

    program ── collective_rpc("hotpass_install", {side, candidate as JSON, hashes}) ──► compiled from those very bytes

No callable and no pickle crosses, so vLLM's switch for insecure serialization is never needed (FAILURES V6). Derived weights lie in
memory that this process has mapped already; what crosses is their name in `ARTEFACTS`. vLLM mixes this class into its worker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.decoder.source import failed
from engines.program import Artefacts, CandidateFailed
from engines.vllm.tree import Tree
from hotpass.canonical import to_plain
from hotpass.decode import from_plain
from hotpass.records.candidate import Candidate
from hotpass.records.measurement import FailureKind

ARTEFACTS: dict[str, Artefacts] = {}
"""Candidate id → what builders made for it: paths of libraries, and tensors of the keeper's memory."""


class HotpassExtension:
    """Methods that the worker gains. Each takes and returns JSON values; a candidate's fault comes back as `failure`."""

    model_runner: Any
    _hotpass_tree: Tree

    def hotpass_begin(self, version: str, threads: int) -> None:
        """Once, after the model is loaded."""
        runner = self.model_runner
        self._hotpass_tree = Tree(runner.model, runner.model_config.hf_config, version, threads)

    def hotpass_slots(self) -> Any:
        return to_plain(self._hotpass_tree.slots())

    def hotpass_template(self, slot: str) -> str:
        return self._hotpass_tree.part_template(slot)

    def hotpass_install(self, order: dict[str, Any]) -> dict[str, Any]:
        """`order`: side, candidate, candidate_id, sources (hash of each part). Gives `report` or `failure`."""
        try:
            candidate = checked_candidate(order)
            report = self._hotpass_tree.install(order["side"], candidate, ARTEFACTS.get(candidate.id, Artefacts()))
        except CandidateFailed as error:
            return {"failure": to_plain(error.failure)}
        return {"report": to_plain(report)}

    def hotpass_compiles(self) -> bool:
        """Whether forwards are compiled in, so that an install needs `hotpass_learn` and `hotpass_recapture`."""
        return self._hotpass_tree.compiled.compiles

    def hotpass_learn(self, side: str) -> None:
        self._hotpass_tree.learn(side)

    def hotpass_recapture(self, side: str) -> None:
        self._hotpass_tree.recapture(side)

    def hotpass_recaptured(self, side: str) -> None:
        self._hotpass_tree.recaptured(side)

    def hotpass_uninstall(self, side: str) -> None:
        self._hotpass_tree.uninstall(side)

    def hotpass_activate(self, side: str) -> None:
        """From now on steps run with that side's parts; "" for as loaded."""
        self._hotpass_tree.activate(side)

    def hotpass_reset_counts(self, side: str) -> None:
        self._hotpass_tree.reset_counts(side)

    def hotpass_counts(self, side: str) -> dict[str, int]:
        return self._hotpass_tree.counts(side)

    def hotpass_installed(self, side: str) -> str:
        return self._hotpass_tree.candidate_of(side)

    def hotpass_structure(self) -> str:
        """`as loaded`, or the digest of a tree that is not what it was at birth; sides off."""
        tree = self._hotpass_tree
        now = tree.structure()
        return "as loaded" if now == tree.born else now


def checked_candidate(order: Mapping[str, Any]) -> Candidate:
    """The candidate of an order, whose id and source hashes must be those announced. Raises CandidateFailed."""
    plain = dict(order["candidate"])
    plain.pop("id", None)
    candidate = from_plain(Candidate, plain)
    hashes = [use.source.sha256 for use in candidate.parts]
    if candidate.id != order["candidate_id"] or hashes != list(order["sources"]):
        raise failed(FailureKind.PROTOCOL, "the sources that came are not those whose hashes were announced")
    return candidate
