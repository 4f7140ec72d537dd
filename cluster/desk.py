"""The desk of a campaign: answers every tool of `search.agents.tools` from the campaign's folder, for any number of callers.

    tool ─► CampaignDesk ─┬─ reads: plan, event log, candidates, briefing          (takes no lock, writes nothing)
                          └─ hands in: inbox ─► the loop records it when it next looks

It runs beside the driver (in its process, in the board actor, or in `hotpass mcp`) and can do nothing that its callers may not: no
measuring, no decision, no release, no export, no policy, and traffic only as the shape table that everybody sees.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from actors.lease import MeasuringLease
from cluster import telling
from cluster.briefing import read_briefing, read_profile, read_sources, write_sources
from cluster.events import writer_of
from cluster.follow import Follower
from cluster.journal import FOLDER
from cluster.plan import Plan, read_plan
from engines.quick_check import quick_check
from hotpass.canonical import Json
from hotpass.errors import InputError, MachineError, nearest
from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartSource, PartUse, Proposal
from hotpass.records.measurement import Verdict
from search.agents import tools
from search.agents.compose import Composer, by_claim
from search.agents.exchange import Exchange, keep_exchange
from search.agents.spend import LlmCall, LlmSpend
from search.board import make_post
from search.catalogue import load_catalogue
from search.inbox import Inbox, Standing, Ticket

LEASE_SECONDS = 30.0
"""How long a quick check waits for a gap between measurements before it says that engines are busy."""
CHECK_SECONDS = 90.0


class CampaignDesk:
    """Implements `search.agents.tools.Desk`. Safe to share between threads."""

    def __init__(
        self,
        folder: Path,
        *,
        catalogue: Callable[[str], tuple[PartSource, ...]] = load_catalogue,
        lease: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        """`catalogue`: device → parts. `lease`: memory-bandwidth domain → held while something computes; the measuring lease."""
        self.folder = Path(folder)
        self.plan: Plan = read_plan(self.folder)
        self.follower = Follower(self.folder, self.plan)
        self.inbox = Inbox(self.folder, admits=self._refused, ledger=self.follower)
        self._catalogue = {source.name: source for source in catalogue(self.plan.deployment.hardware.device)}
        self._lease = lease or (lambda domain: MeasuringLease(domain, patience_seconds=LEASE_SECONDS))
        self._composer: Composer | None = None
        self._tickets: dict[tuple[str, str], Ticket] = {}

    @property
    def composer(self) -> Composer:
        """Raises InputError while no engine was loaded."""
        if self._composer is None:
            briefing = read_briefing(self.folder)
            self._composer = Composer(
                self.plan.deployment,
                briefing.slots,
                allowed=Numerics(self.plan.spec.numerics),
                compiler=briefing.compiler,
                plans=self.plan.plans,
            )
        return self._composer

    def tell(self, call: LlmCall, exchange: Exchange | None = None) -> None:
        """What an agent's call to its LLM came to, for the ledger, and what was said: kept before the ledger names it."""
        if exchange is not None:
            keep_exchange(self.folder, exchange)
        self.inbox.tell(call)

    def made_from(self, asked: tools.SubmitProposal, onto: Candidate) -> Candidate:
        """What a submission comes to on that candidate. Raises InputError."""
        return self.composer.composed(onto, self._uses(asked.parts), asked.settings)

    def waiting(self, author: str) -> int:
        """Its proposals without an attempt; -1 once the search has ended."""
        state = self.follower.refresh()
        if state.stop_reason or state.result is not None:
            return -1
        tried = {row.attempt.candidate_id for row in state.attempts}
        proposed = [i for i in state.candidates.values() if i.proposer == author and i.candidate_id not in tried]
        return len(proposed) + self.inbox.waiting(author)

    def spent(self, author: str) -> LlmSpend:
        """By the ledger, and by what waits to get there."""
        spend = self.follower.refresh().llm_spend.get(author, LlmSpend())
        for call in self.inbox.waiting_calls(author):
            spend = spend.plus(call)
        return spend

    def deployment(self, author: str, asked: tools.NoArguments) -> Json:
        found, spec = self.plan.deployment, self.plan.spec
        space = self.composer.space(())
        model = found.model
        return {
            "model": model.name,
            "architecture": model.architecture,
            "dtype": model.dtype,
            "sizes": {
                "layers": model.num_layers, "hidden": model.hidden_size, "intermediate": model.intermediate_size,
                "heads": model.num_heads, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim, "vocabulary": model.vocab_size,
                "parameters": model.num_params, "packed": list(model.packed_formats),
            },
            "device": found.hardware.device,
            "machine": found.hardware.name,
            "devices": found.hardware.num_devices,
            "isa": list(found.hardware.isa),
            "cache_bytes": found.hardware.last_level_cache_bytes,
            "compiler": self.composer.compiler,
            "numerics_policy": f"{spec.numerics}: wider classes are refused",
            "clients": found.concurrency,
            "settings": {dial.setting.name: list(dial.values) for dial in (*space.dials, *space.serving_dials)},
        }  # fmt: skip

    def read_board(self, author: str, asked: tools.ReadBoard) -> Json:
        state = self.follower.refresh()
        about = self.follower.find(asked.about).id if asked.about else None
        rows = [
            row
            for row in reversed(state.posts)
            if (asked.kind is None or row.post.kind == asked.kind)
            and (about is None or about in row.post.candidates)
            and (asked.before is None or row.seq < asked.before)
        ]
        return {"posts": [telling.post(state, row) for row in rows[: asked.limit]], "more": len(rows) > asked.limit}

    def post(self, author: str, asked: tools.WritePost) -> Json:
        known = {row.seq for row in self.follower.refresh().attempts}
        unknown = [seq for seq in asked.evidence if seq not in known]
        if unknown:
            raise InputError("evidence", unknown[0], "is no attempt of this campaign", "name `number`s of attempts")
        named = [self.follower.find(name).id for name in asked.candidates]
        self.inbox.tell(make_post(author, asked.kind, asked.text, named, asked.evidence))
        return {"posted": True}

    def slots(self, author: str, asked: tools.NoArguments) -> Json:
        table = self.composer.slots
        return {
            "engine": table.engine,
            "version": table.version,
            "slots": [telling.slot_line(*row) for row in by_claim(table)],
        }

    def slot_source(self, author: str, asked: tools.SlotSource) -> Json:
        known = [claim for claim, _, _ in by_claim(self.composer.slots)]
        claim = re.sub(r"\.\d+(?=\.|$)", ".*", asked.slot)
        if claim not in known:
            raise InputError("slot", asked.slot, "is not in the slot table", nearest(asked.slot, known))
        texts = self._sources()
        if claim not in texts:
            raise InputError("slot", asked.slot, "has no source in this engine", "write the part from its signature")
        return {"claim": claim, "what": asked.what, **telling.page(texts[claim][asked.what], asked.from_line)}

    def catalogue(self, author: str, asked: tools.Catalogue) -> Json:
        known = self._known()
        if asked.part is None:
            return {"parts": [self._part_line(source) for source in known.values()]}
        if asked.part not in known:
            raise InputError("part", asked.part, "is not known", nearest(asked.part, list(known)))
        files = dict(known[asked.part].files)
        if asked.file not in files:
            raise InputError("file", asked.file, "is not of this part", nearest(asked.file, list(files)))
        shown = telling.page(files[asked.file], asked.from_line)
        return {**self._part_line(known[asked.part]), "files": sorted(files), "file": asked.file, **shown}

    def candidates(self, author: str, asked: tools.Candidates) -> Json:
        state = self.follower.refresh()
        infos = [i for i in state.candidates.values() if i.proposer.startswith(asked.proposer or "")]
        if asked.verdict is not None:
            rows = {i.candidate_id: telling.best_row(state, i.candidate_id) for i in infos}
            wanted = Verdict(asked.verdict)
            infos = [i for i in infos if (row := rows[i.candidate_id]) and row.attempt.verdict is wanted]
        ranked = telling.ranked(state, infos, asked.order)
        return {"candidates": [telling.candidate_line(state, i) for i in ranked[: asked.limit]], "of": len(infos)}

    def candidate(self, author: str, asked: tools.OneCandidate) -> Json:
        state, found = self.follower.refresh(), self.follower.find(asked.candidate)
        files = telling.sources(found)
        if asked.file is not None and asked.file not in files:
            raise InputError("file", asked.file, "is not of this candidate", nearest(asked.file, list(files)))
        info = state.candidates.get(found.id)
        shown = telling.page(files[asked.file], asked.from_line) if asked.file else {}
        return {
            "candidate": found.id,
            "what": found.label,
            "parts": [{"part": use.source.name, "params": dict(use.params)} for use in found.parts],
            "settings": dict(found.settings),
            "numerics": found.numerics.value,
            "proposer": info.proposer if info else "",
            "hypothesis": info.hypothesis if info else "",
            "parents": [parent[:10] for parent in info.parents] if info else [],
            "attempts": [telling.attempt(row) for row in state.attempts_of(found.id)],
            "files": sorted(files),
            **shown,
        }

    def shapes(self, author: str, asked: tools.NoArguments) -> Json:
        state, times = self.follower.refresh(), self.follower.times
        loaded = {item.row.key: item for item in times.get(AS_LOADED.id, [])}
        best = {item.row.key: item for item in times.get(state.incumbent_id, [])}
        floors = state.start.get("floors_ms", {})
        rows = self.plan.deployment.shapes.rows
        return {
            "kind": "simulated" if self.plan.spec.engine == "fake" else "measured",
            "concurrency": self.plan.deployment.concurrency,
            "rows": [telling.shape_line(row, loaded, best, floors) for row in rows],
        }

    def profile(self, author: str, asked: tools.NoArguments) -> Json:
        """By row of the shape table: where the incumbent's time goes, and how far that is from the roofline's floor; and, where one was
        taken, the profile of the deployment as loaded by operator and by kind of slot."""
        shapes = self.shapes(author, asked)
        weights = [row["share_of_steps"] * (row["incumbent_ms"] or row["loaded_ms"] or 0.0) for row in shapes["rows"]]
        total = sum(weights) or 1.0
        rows = [
            {
                "shape": row["shape"],
                "share_of_time": round(weight / total, 4),
                "ms": row["incumbent_ms"] or row["loaded_ms"],
                "floor_ms": row["floor_ms"],
                "times_the_floor": row["times_the_floor"],
            }
            for row, weight in zip(shapes["rows"], weights, strict=True)
        ]
        hardware, profile = self.plan.deployment.hardware, read_profile(self.folder)
        return {
            "kind": shapes["kind"],
            "rows": sorted(rows, key=lambda row: -row["share_of_time"]),
            "hardware": {"name": hardware.name, "isa": list(hardware.isa), **hardware.details},
            "as_loaded": [telling.profiled_line(row) for row in profile.rows] if profile else [],
            "note": "shares of a profile are to be believed more than its milliseconds"
            if profile
            else "no operators are known: see `hotpass profile`",
        }

    def quick_check(self, author: str, asked: tools.QuickCheck) -> Json:
        use = self._uses([asked.part])[0]
        self.composer.composed(AS_LOADED, [use], {})
        declared, deployment = declaration(use.source), self.plan.deployment
        if self.plan.spec.engine not in ("decoder", "module") or declared.device == "cuda":
            return {
                "looks": "declared well",
                "problem": "",
                "note": "numerics cannot be checked here, only by the engine",
            }
        try:
            with self._lease(deployment.hardware.device) if deployment.hardware.device == "cpu" else nullcontext():
                report = quick_check(use, deployment.model, deadline_seconds=CHECK_SECONDS)
        except MachineError:
            return {
                "looks": "declared well",
                "problem": "",
                "note": "engines are measuring; try again later, or submit",
            }
        return telling.checked(report)

    def submit_proposal(self, author: str, asked: tools.SubmitProposal) -> Json:
        state = self.follower.refresh()
        if state.result is not None or state.stop_reason:
            raise InputError(
                "campaign", self.folder.name, "takes no more proposals: its search has ended", "start another"
            )
        onto = self.follower.find(asked.onto)
        candidate = self.made_from(asked, onto)
        if candidate.id == onto.id:
            raise InputError("submission", onto.label, "changes nothing", "add a part, a parameter or a setting")
        parents = tuple(dict.fromkeys([onto.id, *(self.follower.find(name).id for name in asked.parents)]))
        proposal = Proposal(candidate=candidate, proposer=author, parents=parents, hypothesis=asked.hypothesis)
        ticket = self.inbox.submit(proposal, author, asked.request_id)
        self._tickets[author, asked.request_id] = ticket
        answer: dict[str, Json] = {
            "request_id": asked.request_id,
            "standing": ticket.standing.value,
            "candidate": candidate.id,
            "what": candidate.label,
        }
        if ticket.reason:
            answer["reason"] = ticket.reason
        if ticket.standing is Standing.KNOWN:
            answer["result"] = self._result(ticket)
        if writer_of(self.folder / FOLDER) is None:
            answer["note"] = "the campaign does not run now; this is measured once it is resumed"
        return answer

    def result(self, author: str, asked: tools.Result) -> Json:
        if (asked.request_id is None) == (asked.candidate is None):
            raise InputError("result", "", "needs one of request_id and candidate", "give one of them")
        if asked.request_id is not None:
            ticket = self._tickets.get((author, asked.request_id))
            if ticket is None:
                raise InputError("request_id", asked.request_id, "is not known here", "ask with the candidate's id")
            return self._result(ticket)
        wanted = asked.candidate or ""
        mine = [t for t in self._tickets.values() if t.candidate_id.startswith(wanted)]
        candidate_id = mine[0].candidate_id if mine else self.follower.find(wanted).id
        return self._result(Ticket(request_id="", candidate_id=candidate_id, standing=Standing.PROPOSED))

    def _result(self, ticket: Ticket) -> Json:
        state, found = self.follower.refresh(), self.inbox.result(ticket)
        rows = state.attempts_of(ticket.candidate_id)
        answer = {"candidate": ticket.candidate_id, "attempts": [telling.attempt(row) for row in rows]}
        if isinstance(found, Standing):
            return {**answer, "standing": found.value, "reason": ticket.reason}
        return {**answer, "standing": "measured", "is_incumbent": ticket.candidate_id == state.incumbent_id}

    def _refused(self, candidate: Candidate) -> str:
        return self.composer.reason_against(candidate)

    def _known(self) -> dict[str, PartSource]:
        """Parts by name: the catalogue's, then those that were proposed; of two with one name the later has a digest in its name."""
        known = dict(self._catalogue)
        for candidate in self.follower.candidates().values():
            for use in candidate.parts:
                same = known.setdefault(use.source.name, use.source).sha256 == use.source.sha256
                if not same:
                    known[f"{use.source.name}-{use.source.sha256[:8]}"] = use.source
        return known

    def _uses(self, parts: list[tools.PartArgument]) -> list[PartUse]:
        return self.composer.sources(parts, self._known())

    def _part_line(self, source: PartSource) -> dict[str, Json]:
        return telling.part_line(declaration(source), source.name, self.composer.why_not(source))

    def _sources(self) -> dict[str, dict[str, str]]:
        """Of the slots, made once a campaign when somebody first asks."""
        texts = read_sources(self.folder)
        if not texts and self.plan.spec.engine in ("decoder", "module"):
            from engines.describe import describe_slots

            with self._lease("cpu"):
                texts = describe_slots(self.plan.deployment.model)
            write_sources(self.folder, texts)
        return texts
