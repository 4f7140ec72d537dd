"""`hotpass try`: one candidate of a person through the same judge, gates and ledger as the search's.

    part or candidate or settings ─► candidate ─► fast tier against another candidate ─► (faster) cold, gates ─► Tried
                                                  (settings of the serving loop alone: the slow tier, also cold)

It is recorded in a campaign's own log (`--in DIR`), or in a folder of its own that `hotpass report`, `ui` and `--continue` read alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.campaign import Running, opened_journal, opened_session
from cluster.finish import measure_cold
from cluster.folder import all_candidates
from cluster.plan import Plan
from cluster.session import Session
from cluster.store import read_candidate_folder
from hotpass.errors import InputError
from hotpass.parts import declaration, read_part
from hotpass.records.candidate import AS_LOADED, Candidate, PartUse, Proposal, Value
from hotpass.records.measurement import Attempt, Purpose, Verdict
from hotpass.settings import check_setting
from search.catalogue import applicable, find_part
from search.proposers import lowest_tier
from search.space import make_candidate

LOADED_NAMES = ("loaded", "as-loaded", "as loaded")
EXIT_CODES = {Verdict.FASTER: 0, Verdict.INCONCLUSIVE: 3}
"""Every other verdict is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What came of a try. The verdict is the cold one where there was one, else the first one."""

    candidate: Candidate
    against: Candidate
    attempts: tuple[Attempt, ...]
    """Of the search's tier, then cold."""
    gates: Mapping[str, str]
    """Empty when it was not fast enough to come to the gates."""
    verdict: Verdict
    reason: str
    folder: Path
    """Of the campaign that it is recorded in."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.verdict, 1)


def make_wanted(path: str | None, settings: Sequence[str], params: Sequence[str], dtype: str) -> Candidate:
    """The candidate that a person means: a part or candidate folder, or a built-in part's name, with settings on top. Raises InputError."""
    bound = dict(check_pair(text) for text in settings)
    if path is None:
        if params:
            raise InputError("--param", params[0], "has no part that it belongs to", "give the part's path first")
        if not bound:
            raise InputError(
                "try", "", "has nothing to try", "give a part's path or name, a candidate folder, or --set K=V"
            )
        return make_candidate((), bound, dtype)
    place = Path(path)
    if (place / "candidate.toml").is_file():
        candidate = read_candidate_folder(place, dtype=dtype)
        if params:
            raise InputError("--param", params[0], "cannot change a candidate folder", "edit its candidate.toml")
        return make_candidate(candidate.parts, {**candidate.settings, **bound}, dtype, candidate.parallelism)
    is_path = place.exists() or place.suffix == ".py" or place.parent != Path()
    source = read_part(place) if is_path else find_part(path)
    declared = declaration(source)
    use: PartUse = declared.bind(source, dict(_param(text, declared.params) for text in params))
    return make_candidate((use,), bound, dtype)


def check_pair(text: str) -> tuple[str, Value]:
    """`threads=2` as a checked setting. Raises InputError."""
    name, separator, value = text.partition("=")
    if not separator:
        raise InputError("--set", text, "is not of the form K=V", "write it as --set threads=2")
    return name, check_setting(name, value)


def _param(text: str, known: Mapping[str, Sequence[Value]]) -> tuple[str, Value]:
    """The declared value that is spelled so; `bind` refuses what is none."""
    name, separator, value = text.partition("=")
    if not separator:
        raise InputError("--param", text, "is not of the form K=V", "write it as --param fuse=True")
    return name, next((item for item in known.get(name, ()) if str(item).lower() == value.lower()), value)


def find_candidate(folder: Path, named: str | None) -> Candidate:
    """By id or its beginning in a campaign, or a candidate folder; None and `loaded` are the deployment as loaded."""
    if named is None or named in LOADED_NAMES:
        return AS_LOADED
    if (Path(named) / "candidate.toml").is_file():
        return read_candidate_folder(Path(named))
    known = all_candidates(folder) if folder.is_dir() else {}
    found = [candidate for key, candidate in known.items() if key.startswith(named)]
    if len(found) != 1:
        problem = "begins the id of no candidate here" if not found else f"begins the ids of {len(found)} candidates"
        raise InputError("candidate", named, problem, f"see hotpass candidates {folder}, or say `loaded`")
    return found[0]


def try_candidate(running: Running, candidate: Candidate, against: Candidate) -> Tried:
    """Raises InputError when the candidate cannot be tried on this deployment, MachineError when the machine fails."""
    if candidate.id == against.id:
        raise InputError("candidate", candidate.label, "is what it would be measured against", "change something in it")
    refuse_inapplicable(running.plan, candidate)
    running = replace(running, plan=_to_the_end(running.plan))
    with opened_journal(running) as journal, opened_session(running, journal) as (session, machines):
        refuse_unclaimed(session, candidate)
        session.keep(against)
        session.keep(candidate)
        session.journal.propose(Proposal(candidate=candidate, proposer="person", parents=(against.id,)))
        session.view.activity("builder", candidate.label)
        built = machines.builder.submit(candidate).result()
        session.view.activity("builder", "")
        if built.failure is not None:
            row = session.fail_build(candidate, against, built.failure)
            return _tried(running, candidate, against, [row.attempt], {})
        tier, purpose = lowest_tier(candidate, against), _purpose(session, candidate, against)
        order = session.order(session.engines[0], against, candidate, tier, purpose)
        first = session.settle(order, order.future.result()).attempt
        if first.verdict is not Verdict.FASTER:
            return _tried(running, candidate, against, [first], {})
        finalist = measure_cold(session, candidate, against)
        return _tried(running, candidate, against, [first, finalist.cold.attempt], finalist.gates)


def _to_the_end(plan: Plan) -> Plan:
    """A search gives a loser up after a round; who asks about one candidate is told whether it is slower."""
    return replace(plan, pace=replace(plan.pace, fast=replace(plan.pace.fast, hopeless=None, far_behind=None)))


def _purpose(session: Session, candidate: Candidate, against: Candidate) -> Purpose:
    """A key that was measured already is measured again on purpose only."""
    known = {
        (row.attempt.candidate_id, row.attempt.incumbent_id, row.attempt.purpose) for row in session.state.attempts
    }
    return Purpose.REMEASURE if (candidate.id, against.id, Purpose.SEARCH) in known else Purpose.SEARCH


def _tried(
    running: Running, candidate: Candidate, against: Candidate, attempts: Sequence[Attempt], gates: Mapping[str, str]
) -> Tried:
    last = attempts[-1]
    verdict, reason = last.verdict, last.reason
    broken = [f"{name} {text}" for name, text in gates.items() if text != "pass" and name != "cold"]
    if verdict is Verdict.FASTER and broken:
        failed = any(text.startswith("fail") for text in gates.values())
        verdict, reason = (Verdict.INCORRECT if failed else Verdict.INCONCLUSIVE), "; ".join(broken)
    return Tried(
        candidate=candidate,
        against=against,
        attempts=tuple(attempts),
        gates=dict(gates),
        verdict=verdict,
        reason=reason,
        folder=running.folder,
    )


def refuse_inapplicable(plan: Plan, candidate: Candidate) -> None:
    """Before anything is loaded: what this deployment cannot run at all is wrong input."""
    cores, threads = plan.deployment.hardware.num_devices, candidate.settings.get("threads")
    if plan.deployment.hardware.device == "cpu" and isinstance(threads, int) and threads > cores:
        raise InputError(
            "setting threads", threads, f"is more than the {cores} physical cores here", f"give 1 to {cores}"
        )
    for use in candidate.parts:
        reason = applicable(use.source, plan.deployment, compiler=True)
        if reason is not None:
            raise InputError(
                f"part {use.source.name}",
                plan.deployment.model.name,
                f"does not fit: it {reason}",
                "choose another part or deployment",
            )


def refuse_unclaimed(session: Session, candidate: Candidate) -> None:
    """A part that claims no slot of this engine would never run."""
    assert session.slot_table is not None
    for use in candidate.parts:
        declared = declaration(use.source)
        for claim in declared.claims:
            if not session.slot_table.matching(claim, declared.replaces):
                raise InputError(
                    f"part {use.source.name}: claim", claim, "names no slot of this engine", "see hotpass slots"
                )
