"""The first gates: what must pass before a number is claimed. Each gate says pass, fail with the evidence, or not run with why.

A gate that did not run is not a pass; `passed` asks for an explicit pass of every gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotpass.records.candidate import Candidate, Numerics
from hotpass.records.measurement import Agreement, Attempt, MeasureResult, Pairing, Purpose, Verdict
from verification.numerics import Band
from verification.policy import Policy
from verification.verdict import correctness

GATES = ("logits", "greedy-agreement", "weights", "cold")
"""In the order in which they are run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    name: str
    status: str
    """`pass`, `fail` or `not run`."""
    evidence: str

    @property
    def text(self) -> str:
        """As attempts and reports carry it: `pass`, `fail: …` or `not run: …`."""
        return "pass" if self.status == "pass" else f"{self.status}: {self.evidence}"


def first_gates(
    candidate: Candidate,
    *,
    cold: MeasureResult | None,
    cold_attempt: Attempt | None,
    agreement: Agreement | None,
    weights_unchanged: bool | None,
    band: Band,
    policy: Policy,
) -> tuple[GateResult, ...]:
    """All first gates for one candidate. What is None was not run."""
    return (
        _logits(cold, band, policy),
        _greedy(candidate, agreement, band, policy),
        _weights(weights_unchanged),
        _cold(cold, cold_attempt),
    )


def passed(gates: Mapping[str, str]) -> bool:
    """True when every first gate passed explicitly, and so did every other one that is named."""
    return all(gates.get(name) == "pass" for name in GATES) and set(gates.values()) == {"pass"}


def _logits(cold: MeasureResult | None, band: Band, policy: Policy) -> GateResult:
    if cold is None:
        return GateResult(name="logits", status="not run", evidence="no cold measurement")
    if cold.failure is not None:
        return GateResult(name="logits", status="fail", evidence=cold.failure.message)
    finding = correctness(cold, band, policy)
    return GateResult(name="logits", status="pass" if finding.ok else "fail", evidence=finding.evidence)


def _greedy(candidate: Candidate, agreement: Agreement | None, band: Band, policy: Policy) -> GateResult:
    name = "greedy-agreement"
    if agreement is None or agreement.clear == 0:
        return GateResult(name=name, status="not run", evidence="no text was scored")
    share = agreement.clear_agree / agreement.clear
    seen = f"{agreement.clear_agree} of {agreement.clear} clear tokens agree over {agreement.texts} texts"
    if candidate.numerics is Numerics.BIT_IDENTICAL:
        # Bit-identity is to the loaded baseline, held in the logits gate; against the reference only clear tokens bind.
        ok = share == 1.0
    elif candidate.numerics is Numerics.LOSSY:
        ok = share >= policy.lossy_clear_agreement and agreement.kl_mean <= policy.lossy_kl
        seen += f", mean KL {agreement.kl_mean:.2g} nats"
    else:
        ok = share == 1.0 and agreement.max_abs <= band.max_abs
        seen += f", largest difference {agreement.max_abs:.2g} within {band.max_abs:.2g}"
    return GateResult(name=name, status="pass" if ok else "fail", evidence=seen)


def _weights(unchanged: bool | None) -> GateResult:
    if unchanged is None:
        return GateResult(name="weights", status="not run", evidence="the full hash was not taken")
    status, evidence = (
        ("pass", "full hash as at load") if unchanged else ("fail", "the full hash differs from the one at load")
    )
    return GateResult(name="weights", status=status, evidence=evidence)


def _cold(cold: MeasureResult | None, attempt: Attempt | None) -> GateResult:
    if cold is None or attempt is None:
        return GateResult(name="cold", status="not run", evidence="no cold measurement")
    order = cold.assignment
    pairing = cold.pairing or order.pairing
    if order.purpose is not Purpose.COLD or pairing is not Pairing.TWO_ENGINES:
        return GateResult(
            name="cold",
            status="fail",
            evidence=f"measured as {order.purpose} {pairing}, not cold with each side in a process of its own",
        )
    status = "pass" if attempt.verdict is Verdict.FASTER else "fail"
    return GateResult(name="cold", status=status, evidence=f"{attempt.verdict}: {attempt.reason}")
