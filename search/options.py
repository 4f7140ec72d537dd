"""What can be chosen at one place: parts as options with the parameters that the policy admits, settings as dials.

Everything here is about one part or one setting on one deployment; how choices combine is `search.space`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hotpass.canonical import canonical_json
from hotpass.parts import PartDeclaration, declaration
from hotpass.records.candidate import Numerics, PartSource, Value
from hotpass.records.deployment import Deployment
from hotpass.records.slots import SlotTable, covered_slots
from hotpass.settings import SETTINGS, Setting, numerics_of_settings
from search.catalogue import lacking

REFERENCE = "reference"
"""The choice of a place that leaves the engine's own code there."""

SERVING_SETTINGS = ("chunk_tokens", "max_batch")
"""Settings of the serving loop: on the fixed shapes of the fast tier they change nothing, so only the slow tier can judge them."""

MODULE_SETTINGS = ("threads", "compile_mode")
"""Those that mean something to a module, which has neither KV nor a serving loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A part as a choice of its place."""

    key: str
    """`name@` and 8 digits of the source hash."""
    source: PartSource
    declaration: PartDeclaration
    covers: frozenset[str]
    """Concrete slots of this engine that it replaces."""
    params: Mapping[str, tuple[Value, ...]]
    """Parameter → values that the policy admits; the first of each together are an admitted combination."""
    summary: str
    """First sentence of why it should help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Claims under one domain, with the parts that make exactly these claims."""

    name: str
    """As `model.layers.*.mlp`, with the domain in brackets unless it is everything."""
    options: tuple[Option, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return (REFERENCE, *(option.key for option in self.options))


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    """A setting with the values that are different from one another on this deployment, the default first."""

    setting: Setting
    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        return f"set {self.setting.name}"

    @property
    def texts(self) -> tuple[str, ...]:
        return spelled(self.values)


def spelled(values: tuple[Value, ...]) -> tuple[str, ...]:
    """Values as the texts that stand for them in choices. Kept, since every walk asks for them again."""
    return _spelled(values, tuple(map(type, values)))


@lru_cache(maxsize=4096)
def _spelled(values: tuple[Value, ...], kinds: tuple[type, ...]) -> tuple[str, ...]:
    """`kinds` is part of the key: (0, 1) and (False, True) are equal to Python, and are not spelled alike."""
    return tuple(canonical_json(value) for value in values)


def build_places(
    deployment: Deployment,
    slots: SlotTable,
    parts: Sequence[PartSource],
    allowed: Numerics,
    applies: Callable[[PartSource], str | None],
    compiler: bool,
) -> tuple[tuple[Place, ...], dict[str, str]]:
    """Places, widest first, and for each part that is in none the reason."""
    left_out: dict[str, str] = {}
    groups: dict[tuple[str, str], list[Option]] = {}
    for source in {part.sha256: part for part in parts}.values():
        declared = declaration(source)
        found = applies(source) or _option(source, declared, slots, allowed, deployment, compiler)
        if isinstance(found, str):
            left_out[source.name] = found
        else:
            groups.setdefault((" + ".join(sorted(declared.claims)), declared.domain), []).append(found)
    places = [
        Place(
            name=claims if domain == "True" else f"{claims} [{domain}]",
            options=tuple(sorted(group, key=lambda option: option.key)),
        )
        for (claims, domain), group in groups.items()
    ]
    return tuple(sorted(places, key=_widest_first)), left_out


def build_dials(
    deployment: Deployment, allowed: Numerics, compiler: bool, without: Mapping[str, str]
) -> tuple[tuple[Dial, ...], tuple[Dial, ...], dict[str, str]]:
    """Dials of the model's forward, dials of the serving loop, and for each setting that is neither the reason; `without` has reasons for
    some."""
    forward: list[Dial] = []
    serving: list[Dial] = []
    left_out: dict[str, str] = dict(without)
    for setting in SETTINGS:
        if setting.name in without:
            continue
        values = _values_here(setting, deployment, allowed, compiler)
        if len(values) < 2:
            left_out[setting.name] = "has one effective value on this deployment"
        else:
            (serving if setting.name in SERVING_SETTINGS else forward).append(Dial(setting=setting, values=values))
    return tuple(forward), tuple(serving), left_out


def _widest_first(place: Place) -> tuple[int, bool, str]:
    widest = max(len(option.covers) for option in place.options)
    return (-widest, place.options[0].declaration.domain != "True", place.name)


def _option(
    source: PartSource,
    declared: PartDeclaration,
    slots: SlotTable,
    allowed: Numerics,
    deployment: Deployment,
    compiler: bool,
) -> Option | str:
    """The part as an option, or why it cannot be one."""
    if declared.engine != slots.engine:
        return f"is for the {declared.engine} engine"
    claimed = [slot for claim in declared.claims for slot in slots.matching(claim, declared.replaces)]
    if not claimed:
        return f"claims no slot of this engine ({', '.join(declared.claims)})"
    others = sorted({slot.stands_for for slot in claimed if declared.replaces not in ("", slot.stands_for)})
    if others:
        return f"replaces {declared.replaces}, but the model has {', '.join(others)} there"
    names = list(declared.params)
    possible = []
    reason = None
    for combination in itertools.product(*declared.params.values()):
        bound = dict(zip(names, combination, strict=True))
        missing = lacking(declared.required_with(bound), declared, deployment, compiler=compiler)
        reason = reason or missing
        if missing is None:
            possible.append((combination, bound))
    if not possible:
        return reason or "has no possible parameters"
    dtype = deployment.model.dtype
    admitted = [combination for combination, bound in possible if allowed.allows(declared.numerics_of(bound, dtype))]
    if not admitted:
        return f"is wider than the policy {allowed} with every parameter"
    # The first value of each parameter together are the first admitted combination: the defaults, where they are admitted.
    params = {name: tuple(dict.fromkeys(combination[i] for combination in admitted)) for i, name in enumerate(names)}
    return Option(
        key=f"{source.name}@{source.sha256[:8]}",
        source=source,
        declaration=declared,
        covers=covered_slots(slots, declared.claims, declared.keeps, declared.replaces),
        params=params,
        summary=declared.summary.split("\n\n")[0].replace("\n", " "),
    )


def most_prefilled(deployment: Deployment) -> int:
    """Prompt tokens that one step could take, were there no limit: the longest prompt of each client, as far as the table tells."""
    prefills = [row for row in deployment.shapes.rows if row.query_tokens > row.num_seqs]
    return deployment.concurrency * max(
        (row.context_max + row.query_tokens for row in prefills), default=deployment.model.max_context
    )


def _values_here(setting: Setting, deployment: Deployment, allowed: Numerics, compiler: bool) -> tuple[Value, ...]:
    """The default, and the values that differ from it in effect on this deployment and that the policy admits."""
    hardware, model = deployment.hardware, deployment.model
    if setting.device not in ("any", hardware.device):
        return (setting.default,)
    if deployment.serving.engine == "module" and setting.name not in MODULE_SETTINGS:
        return (setting.default,)
    if deployment.serving.engine == "vllm":  # takes its arguments at load only
        return (setting.default,)

    def differs(value: Value) -> bool:
        if value == setting.default:
            return False
        if setting.name == "threads":  # the engine's own choice is one thread a core
            return isinstance(value, int) and value < hardware.num_devices
        if setting.name == "max_batch":
            return isinstance(value, int) and value < deployment.concurrency
        if setting.name == "chunk_tokens":  # both sides split alike what is shorter than both
            least = min(int(value or 0), int(setting.default or 0))
            return int(value or 0) <= model.max_context and least < most_prefilled(deployment)
        if setting.name == "kv_dtype":
            return value != model.dtype
        return compiler or setting.name != "compile_mode" or hardware.device != "cpu"

    values = [
        v for v in setting.values if differs(v) and allowed.allows(numerics_of_settings({setting.name: v}, model.dtype))
    ]
    return (setting.default, *values)
