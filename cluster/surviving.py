"""Plans of parallelism that a search may choose among: the cost model's survivors that the engine at hand can run.

    hardware with several devices ─► cluster.planning: every layout of one replica ─► fits, is known ─► the engine runs it? ─► Plan.plans

On a machine that is one device (any CPU, a single GPU) one plan is left: as loaded. So it is with the engines that run one rank; what
the cost model would have kept beyond that is said in a note. What is not here: launching ranks.
"""

from __future__ import annotations

from cluster.spec import CampaignSpec
from hotpass.errors import InputError
from hotpass.records.deployment import HardwareRef
from search.space import AS_IT_IS, PlanOf

MAX_PLANS = 8
"""The best of them: each costs an engine a reload of minutes."""
KINDS = ("tp", "dp", "pp", "ep", "dcp")
"""Kinds of parallelism that a candidate names; how a mixture's experts are cut follows from them."""
RANKS = {"decoder": 1, "module": 1, "vllm": 1}
"""Engine → ranks that it can run; those not named can run any number (the fake one only)."""


def surviving_plans(spec: CampaignSpec, hardware: HardwareRef) -> tuple[tuple[PlanOf, ...], tuple[str, ...]]:
    """Plans, as loaded first, and sentences for the user. Never fails: a plan that nobody could price is not in the space."""
    if hardware.device != "cuda" or hardware.num_devices == 1 or spec.engine == "module":
        return (AS_IT_IS,), ()
    try:
        priced = _priced(spec, hardware)
    except InputError as error:
        return (AS_IT_IS,), (f"plans of parallelism are not searched over: {error}",)
    most = RANKS.get(spec.engine, hardware.num_devices)
    kept = [plan for devices, plan in priced if plan and devices <= most][: MAX_PLANS - 1]
    left = [plan for _, plan in priced if plan and plan not in kept]
    notes = (
        (
            f"the cost model keeps {len(left)} more plans of parallelism on these {hardware.num_devices} devices (first "
            f"{_spelled(left[0])}), which the {spec.engine} engine cannot run",
        )
        if left and most < hardware.num_devices
        else ()
    )
    return (AS_IT_IS, *kept), notes


def _priced(spec: CampaignSpec, hardware: HardwareRef) -> list[tuple[int, PlanOf]]:
    """(devices, layout of one replica) of all that fit and whose time is known, the best first, each once; empty for one device."""
    from cluster.planning import plan

    found = plan(
        spec.model,
        f"{hardware.name}x{hardware.num_devices}",
        spec.traffic,
        concurrency=spec.concurrency,
        objective="latency",
        disaggregated=False,
        simulate=False,
    )
    plans: list[tuple[int, PlanOf]] = []
    for made in found.plans:
        degrees = {kind: made.layout[kind] for kind in KINDS if made.layout[kind] != 1}
        if made.replicas == 1 and (made.gpus, degrees) not in plans:
            plans.append((made.gpus, degrees))
    return plans


def _spelled(plan: PlanOf) -> str:
    return " ".join(f"{kind}{degree}" for kind, degree in plan.items())
