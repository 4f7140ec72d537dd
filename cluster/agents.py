"""Agents of a campaign: started beside its search, each in a Ray actor of its own (or in a thread, without Ray), stopped with it.

    driver ─► BoardServer (actor on this node) ─► the campaign's folder
         └──► ProposerServer × N (actors) ─ tools ─► BoardServer          LLM keys: here until the actors have them, then only there

The driver never waits for an agent: it looks into the inbox when it has nothing better to do, and asks how agents stand without
waiting for the answer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from actors.board import BoardServer, NearLink, RemoteLink
from actors.errors import ray_errors
from actors.proposer import ProposerServer, ProposerSpec, Standing, is_on_this_machine
from cluster.briefing import read_profile, write_profile
from cluster.desk import CampaignDesk
from cluster.plan import Plan
from cluster.ports import View
from cluster.session import Session
from hotpass.errors import MachineError
from hotpass.records.candidate import AS_LOADED
from hotpass.records.measurement import Assignment, Purpose, Tier
from search.agents.briefs import brief_of
from search.agents.llm import LlmSpec
from search.agents.secret import Secret, give_keys, take_keys
from search.agents.spend import LlmCaps

STOP_SECONDS = 10.0
"""An agent ends its request within this after it was told to stop; an actor that does not is killed."""
NICENESS = 15
"""Of agents' own processes."""
LOOK_SECONDS = 1.0
"""Between two questions to an actor how it stands."""

PROFILE_SECONDS = 60.0

DeskOpener = Callable[[Path], CampaignDesk]


class Agents(Protocol):
    """Those of one campaign, started."""

    def standings(self) -> Mapping[str, Standing]:
        """Author → what it does, as far as known without waiting."""
        ...

    def close(self) -> None: ...


class Expected:
    """Whether the search should wait for agents; tells the view once of each that has ended."""

    def __init__(self, agents: Agents, view: View) -> None:
        self._agents, self._view = agents, view
        self._told: set[str] = set()

    def __call__(self) -> bool:
        standings = self._agents.standings()
        for author, standing in standings.items():
            if standing.ended and author not in self._told:
                self._told.add(author)
                self._view.note(f"{author} proposes no more: {standing.ended}")
        return any(standing.is_hopeful for standing in standings.values())


@contextlib.contextmanager
def open_agents(
    plan: Plan, view: View, keys: Mapping[str, Secret], *, desk: DeskOpener = CampaignDesk
) -> Iterator[Callable[[], bool]]:
    """Agents are at work until exit; yields what says whether to wait for them. Without agents nothing is started."""
    if not plan.spec.agents:
        yield lambda: False
        return
    specs = proposer_specs(plan)
    folder = Path(plan.spec.out)
    agents: Agents = RemoteAgents(specs, folder, keys, desk) if plan.spec.ray else NearAgents(specs, folder, keys, desk)
    expected = Expected(agents, view)
    try:
        yield expected
    finally:
        expected()
        agents.close()


@contextlib.contextmanager
def keys_taken(plan: Plan) -> Iterator[dict[str, Secret]]:
    """LLM keys are out of this process's environment, so that nothing which it starts inherits them; put back at the end."""
    if not plan.spec.agents:
        yield {}
        return
    keys = take_keys(os.environ)
    try:
        yield keys
    finally:
        give_keys(keys, os.environ)


def brief_agents(session: Session, folder: Path) -> None:
    """Before agents begin, once a campaign: a profile of the deployment as loaded, by the engine that measures. It costs seconds."""
    plan, engine = session.plan, session.engines[0]
    if not plan.spec.agents or read_profile(folder) is not None:
        return
    session.view.activity(engine.name, "profile for the agents")
    order = Assignment(
        incumbent=AS_LOADED,
        candidate=AS_LOADED,
        tier=Tier.FAST,
        purpose=Purpose.AUDIT,
        rows=plan.deployment.shapes.rows,
        seed=session.seed_of("profile", 0),
        deadline_seconds=PROFILE_SECONDS,
    )
    try:
        profile = engine.profile(order)
    except MachineError as error:
        session.view.note(f"no profile for the agents: {error}")
        profile = None
    session.view.activity(engine.name, "")
    if profile is not None and profile.failure is None:
        write_profile(folder, profile)


def proposer_specs(plan: Plan) -> list[ProposerSpec]:
    """One for each agent; caps are shared out evenly, so that no two can break them together."""
    spec, device = plan.spec, plan.deployment.hardware.device
    llm = LlmSpec(model=spec.llm, api_base=spec.llm_api_base, context_tokens=spec.llm_context, tools=spec.llm_tools)
    caps = LlmCaps(tokens=spec.llm_max_tokens // spec.agents, usd=spec.llm_max_usd / spec.agents)
    shares_memory = spec.engine != "fake" and is_on_this_machine(spec.llm_api_base)
    return [
        ProposerSpec(
            index=index,
            llm=llm,
            caps=caps,
            turn_seconds=spec.llm_turn_seconds,
            lease_domain=device if shares_memory else "",
        )
        for index in range(spec.agents)
    ]


class NearAgents:
    """In threads of this process, over one desk."""

    def __init__(
        self, specs: Sequence[ProposerSpec], folder: Path, keys: Mapping[str, Secret], open_desk: DeskOpener
    ) -> None:
        link = NearLink(open_desk(folder))
        self._servers = [ProposerServer(spec, link, keys) for spec in specs]
        self._threads = [
            threading.Thread(target=server.run, name=server.author, daemon=True) for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def standings(self) -> Mapping[str, Standing]:
        return {server.author: server.standing() for server in self._servers}

    def close(self) -> None:
        for server in self._servers:
            server.stop()
        for thread in self._threads:
            thread.join(STOP_SECONDS)


class RemoteAgents:
    """In actors: made again by Ray when they die, with what they spent so far read from the ledger."""

    def __init__(
        self, specs: Sequence[ProposerSpec], folder: Path, keys: Mapping[str, Secret], open_desk: DeskOpener
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = f"board-{folder.resolve()}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        with ray_errors():
            self._board = ray.remote(BoardServer).options(
                num_cpus=0, num_gpus=0, max_restarts=-1, max_task_retries=2, max_concurrency=4 + len(specs),
                scheduling_strategy=here, name=name,
            ).remote(partial(open_desk, folder.resolve()))  # fmt: skip
            made = ray.remote(ProposerServer).options(
                num_cpus=0, num_gpus=0, max_restarts=4, max_task_retries=4, max_concurrency=3
            )
            link = RemoteLink(name)
            self._actors = {
                f"agent:{brief_of(spec.index).name}": made.remote(replace(spec, niceness=NICENESS), link, dict(keys))
                for spec in specs
            }
            self._runs: dict[str, Any] = {author: actor.run.remote() for author, actor in self._actors.items()}
        self._known = {author: Standing() for author in self._actors}
        self._asked: dict[str, Any] = {}
        self._looked = 0.0

    def standings(self) -> Mapping[str, Standing]:
        """Answers that have come are taken; new questions are asked once a second."""
        for author, reference in [*self._asked.items(), *self._runs.items()]:
            self._take(author, reference)
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            for author, actor in self._actors.items():
                if author in self._runs and author not in self._asked:
                    self._asked[author] = actor.standing.remote()
        return dict(self._known)

    def close(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            for actor in self._actors.values():
                actor.stop.remote()
            ray.wait([*self._runs.values()], num_returns=len(self._runs), timeout=STOP_SECONDS) if self._runs else None
        for actor in (*self._actors.values(), self._board):
            ray.kill(actor)

    def _take(self, author: str, reference: Any) -> None:
        import ray

        done, _ = ray.wait([reference], timeout=0)
        if not done:
            return
        is_run = self._runs.get(author) is reference
        (self._runs if is_run else self._asked).pop(author, None)
        try:
            self._known[author] = ray.get(reference)
        except ray.exceptions.RayError as error:
            if is_run:
                self._known[author] = Standing(ended=f"its process died: {type(error).__name__}")
