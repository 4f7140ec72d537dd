"""Engines and builders as Ray actors: the plain servers, wrapped last, with the checks that Ray leaves to its user.

    feasible? ─► actor ─► versions equal? ─► RemoteEngine.submit ─► Future[Measured]   (watched: an actor that hangs is killed and made again)

A demand that no node can meet is an error at once, never a wait; so is another Python, Ray, torch or hotpass on a node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from actors.builder import BUILDS_AT_ONCE, BuilderServer, Built
from actors.engine import EngineServer, Evidence, Measured, node_facts
from actors.errors import ray_errors, translated
from actors.spec import EngineSpec, wider_bits
from hotpass.errors import EngineDied, MachineError
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Assignment, BaselineMeasurement, OutputCheck, Tier
from hotpass.records.profile import Profile
from hotpass.records.shapes import ShapeRow
from hotpass.records.slots import SlotTable

T = TypeVar("T")

START_SECONDS = 60.0
"""An actor that does not answer by then has no node that takes it, or its environment cannot be made."""
LOAD_SECONDS = 900.0
CALL_SECONDS = 600.0
GRACE_SECONDS = 60.0
"""Beyond an assignment's deadline and the patience for the lease: then the actor itself hangs."""
LEASE_SECONDS = 600.0
COMPARED = ("python", "ray", "torch", "hotpass")


def check_feasible(nodes: Sequence[Mapping[str, Any]], demand: Mapping[str, float], what: str) -> None:
    """`nodes` as `ray.nodes()` gives them. Raises MachineError naming demand and capacity when no living node could ever hold it."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(node.get(name, 0.0) >= amount for name, amount in demand.items()) for node in alive):
        return
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in demand.items())
    largest = ", ".join(f"{max((node.get(name, 0.0) for node in alive), default=0.0):g} {name}" for name in demand)
    raise MachineError(f"{what} needs a node with {wanted}; the largest of {len(alive)} nodes has {largest}")


def check_versions(here: Mapping[str, Any], there: Mapping[str, Any], what: str) -> None:
    """Raises MachineError with a table when a node runs other versions than this process."""
    differing = [name for name in COMPARED if str(here[name]) != str(there[name])]
    if differing:
        rows = "\n".join(f"  {name:<8} {here[name]!s:<14} {there[name]!s}" for name in COMPARED)
        raise MachineError(
            f"{what} on {there['host']} has another {', '.join(differing)} than this process; make them equal:\n"
            f"  {'':<8} {'here':<14} {there['host']}\n{rows}"
        )


class RemoteEngine:
    """An engine server in an actor. Made again, and loaded again, after its process died."""

    def __init__(self, spec: EngineSpec, num_cpus: float) -> None:
        self.name = spec.name
        self.spec = spec
        self.num_cpus = num_cpus
        self._deployment: tuple[Deployment, Tier] | None = None
        self._actor: Any = None
        self._start()

    def load(self, deployment: Deployment, tier: Tier) -> Mapping[str, float]:
        self._deployment = (deployment, tier)
        phases: dict[str, float] = self._ask("load", deployment, tier, timeout=LOAD_SECONDS)
        return phases

    def slots(self) -> SlotTable:
        table: SlotTable = self._ask("slots")
        return table

    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = self._ask("facts")
        return facts

    def baselines(self) -> Sequence[str]:
        names: tuple[str, ...] = self._ask("baselines")
        return names

    def baseline(self, name: str, rows: Sequence[ShapeRow], seed: int, deadline_seconds: float) -> BaselineMeasurement:
        found: BaselineMeasurement = self._ask("baseline", name, rows, seed, deadline_seconds)
        return found

    def noise(self) -> Sequence[OutputCheck]:
        checks: tuple[OutputCheck, ...] = self._ask("noise")
        return checks

    def evidence(self, candidate: Candidate, seed: int, noise_abs: float) -> Evidence:
        found: Evidence = self._ask("evidence", candidate, seed, noise_abs)
        return found

    def profile(self, assignment: Assignment) -> Profile | None:
        found: Profile | None = self._ask("profile", assignment)
        return found

    def widen(self) -> Sequence[int]:
        depths: tuple[int, ...] = self._ask("widen", timeout=LOAD_SECONDS)
        if depths and self._deployment is not None:  # one that is made again has them too
            wider = wider_bits(self.spec, self._deployment[0])
            self.spec = self.spec if wider is None else replace(self.spec, narrowest_bits=wider)
        return depths

    def submit(self, assignment: Assignment) -> Future[Measured]:
        """An actor that died at the last call is made and loaded again first, beside the caller: others measure meanwhile."""
        if self._actor is not None:
            return self._submitted(assignment)
        target: Future[Measured] = Future()

        def revive() -> None:
            try:
                self._start()
                if self._deployment is not None:
                    self.load(*self._deployment)
                source = self._submitted(assignment)
            except Exception as error:
                target.set_exception(error)
                return
            source.add_done_callback(lambda done: _pass_on(done, target))

        threading.Thread(target=revive, name=f"{self.name} again", daemon=True).start()
        return target

    def _submitted(self, assignment: Assignment) -> Future[Measured]:
        reference = self._actor.measure.remote(assignment)
        patience = assignment.deadline_seconds + LEASE_SECONDS + GRACE_SECONDS
        return watched(reference.future(), patience, self._kill, self._lost)

    def close(self) -> None:
        """Ask the engine to end its processes, then end the actor."""
        if self._actor is not None:
            try:
                self._ask("close", timeout=30.0)
            finally:
                self._kill()

    def _start(self) -> None:
        import ray

        demand = {"CPU": self.num_cpus} | ({"GPU": 1.0} if self.spec.device == "cuda" else {})
        with ray_errors():
            check_feasible(ray.nodes(), demand, self.name)
            remote = ray.remote(EngineServer).options(
                num_cpus=self.num_cpus, num_gpus=int(self.spec.device == "cuda"), max_restarts=0, max_concurrency=1
            )
            self._actor = remote.remote(self.spec)
        check_versions(node_facts(), self._ask("facts", timeout=START_SECONDS), self.name)

    def _ask(self, method: str, *arguments: object, timeout: float = CALL_SECONDS) -> Any:
        import ray

        if self._actor is None:
            raise EngineDied(f"{self.name} is not running")
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            self._kill()
            raise MachineError(f"{self.name} did not answer `{method}` within {timeout:.0f} s") from error
        except ray.exceptions.RayError as error:
            meant = translated(error)
            if isinstance(meant, EngineDied):
                self._lost()
            raise meant from error

    def _kill(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def _lost(self) -> None:
        self._actor = None


class RemoteBuilder:
    """A builder server in an actor, made again after its process died; it sees no GPU."""

    def __init__(self, spec: EngineSpec, deployment: Deployment, deadline_seconds: float) -> None:
        self._made_from = (spec, deployment, deadline_seconds)
        self._actor: Any = None
        self.has_compiler = self._start()

    def submit(self, candidate: Candidate) -> Future[Built]:
        if self._actor is None:
            self._start()
        return watched(self._actor.build.remote(candidate).future(), CALL_SECONDS, self.close, self._lost)

    def widen(self) -> None:
        """The next one that is made builds for deeper cuts."""
        spec, deployment, deadline_seconds = self._made_from
        wider = wider_bits(spec, deployment)
        if wider is not None:
            self._made_from = (replace(spec, narrowest_bits=wider), deployment, deadline_seconds)
            self.close()

    def close(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor)

    def _start(self) -> bool:
        import ray

        with ray_errors():
            remote = ray.remote(BuilderServer).options(
                num_cpus=0, num_gpus=0, max_restarts=0, max_concurrency=BUILDS_AT_ONCE
            )
            self._actor = remote.remote(*self._made_from)
            has_compiler: bool = ray.get(self._actor.has_compiler.remote(), timeout=START_SECONDS)
            return has_compiler

    def _lost(self) -> None:
        self._actor = None


def _pass_on(done: Future[T], target: Future[T]) -> None:
    error = done.exception()
    if error is None:
        target.set_result(done.result())
    else:
        target.set_exception(error)


def watched(
    source: Future[T], patience_seconds: float, kill: Callable[[], None], lost: Callable[[], None]
) -> Future[T]:
    """The same answer with Ray's errors translated. Without one in time, `kill` is called; its error then comes through Ray."""
    target: Future[T] = Future()
    timer = threading.Timer(patience_seconds, kill)
    timer.daemon = True

    def forward(done: Future[T]) -> None:
        timer.cancel()
        error = done.exception()
        if error is None:
            target.set_result(done.result())
            return
        meant = translated(error)
        if isinstance(meant, EngineDied):
            lost()
        target.set_exception(meant)

    timer.start()
    source.add_done_callback(forward)
    return target
