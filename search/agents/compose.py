"""From what a proposer submitted to a candidate: its parts put onto another candidate, whose own parts give way where they clash.

Pure functions of sources and a deployment; nothing of a part is run. Whatever cannot be proposed is an InputError that says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotpass.errors import InputError, nearest
from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, Numerics, PartSource, PartUse
from hotpass.records.deployment import Deployment
from hotpass.records.slots import Slot, SlotTable
from hotpass.settings import DEFAULTS, check_setting
from search.agents.tools import PartArgument, Value
from search.options import Option
from search.space import AS_IT_IS, PlanOf, Space

MAX_SPACES = 64


class Composer:
    """What can be composed on one deployment."""

    def __init__(
        self,
        deployment: Deployment,
        slots: SlotTable,
        *,
        allowed: Numerics,
        compiler: bool,
        plans: Sequence[PlanOf] = (AS_IT_IS,),
    ) -> None:
        self.plans = tuple(plans)
        self.deployment, self.slots, self.allowed, self.compiler = deployment, slots, allowed, compiler
        self._spaces: dict[tuple[str, ...], Space] = {}

    def sources(self, asked: Sequence[PartArgument], known: Mapping[str, PartSource]) -> list[PartUse]:
        """The parts with their parameters bound. `known`: parts that may be named without their source. Raises InputError."""
        return [_bound(argument, known) for argument in asked]

    def composed(self, onto: Candidate, uses: Sequence[PartUse], settings: Mapping[str, Value]) -> Candidate:
        """`onto` with these parts and settings. Raises InputError: a part that does not apply, parts that clash, a wider numerics class."""
        space = self.space((*(use.source for use in onto.parts), *(use.source for use in uses)))
        options = {option.source.sha256: option for option in space.options}
        mine = [(self._option(space, options, use), use.params) for use in uses]
        for index, (option, _) in enumerate(mine):
            clashing = [other.source.name for other, _ in mine[:index] if _clash(space, option, other)]
            if clashing:
                raise InputError(
                    "parts", option.source.name, f"covers slots that {clashing[0]} covers too", "submit one of the two"
                )
        kept = [
            (options[use.source.sha256], use.params)
            for use in onto.parts
            if use.source.sha256 in options
            and not any(_clash(space, options[use.source.sha256], option) for option, _ in mine)
        ]
        wanted = {**onto.settings, **{name: _setting(name, value) for name, value in settings.items()}}
        choices = space.choices_for([*kept, *mine], wanted, onto.parallelism)
        self._check_settings(space, settings)
        try:
            candidate = space.to_candidate(choices)
        except ValueError as error:
            raise InputError("parts", str(error), "cannot be proposed here", "see the tool `catalogue`") from None
        lost = {use.source.name for use in uses} - {use.source.name for use in candidate.parts}
        if lost:
            raise InputError("parts", sorted(lost)[0], "is switched off by a wider part", "choose another `onto`")
        if not space.admits(candidate):
            raise InputError(
                "numerics", candidate.numerics, f"is wider than the policy {self.allowed}", "stay within the policy"
            )
        return candidate

    def reason_against(self, candidate: Candidate) -> str:
        """Why a whole candidate cannot be measured in this campaign; empty when it can."""
        try:
            made = self.composed(Candidate(parallelism=candidate.parallelism), candidate.parts, candidate.settings)
        except InputError as error:
            return str(error)
        return "" if made.id == candidate.id else "does not come out as the same candidate when it is composed here"

    def space(self, parts: Sequence[PartSource]) -> Space:
        """The space of these parts alone; kept, since the same few are asked for again and again."""
        key = tuple(sorted({part.sha256 for part in parts}))
        if key not in self._spaces:
            if len(self._spaces) >= MAX_SPACES:
                self._spaces.clear()
            self._spaces[key] = Space.build(
                self.deployment, self.slots, parts, allowed=self.allowed, compiler=self.compiler, plans=self.plans
            )
        return self._spaces[key]

    def why_not(self, source: PartSource) -> str:
        """Why a part is not in the space of this deployment; empty when it is. Raises InputError for an unreadable declaration."""
        return self.space((source,)).left_out.get(source.name, "")

    def _option(self, space: Space, options: Mapping[str, Option], use: PartUse) -> Option:
        option = options.get(use.source.sha256)
        if option is None:
            why = space.left_out.get(use.source.name, "does not apply here")
            claims = declaration(use.source).claims
            unknown = [claim for claim in claims if not self.slots.matching(claim)]
            remedy = (
                nearest(unknown[0], [claim for claim, _, _ in by_claim(self.slots)])
                if unknown
                else "see the tools `slots` and `catalogue`"
            )
            raise InputError(f"part {use.source.name}", ", ".join(claims), why, remedy)
        for name, value in use.params.items():
            if value not in option.params[name]:
                raise InputError(
                    f"{use.source.name}: parameter {name}",
                    value,
                    f"is not admitted here (numerics policy {self.allowed}, or the machine lacks what it needs)",
                    f"use one of {list(option.params[name])}",
                )
        return option

    def _check_settings(self, space: Space, settings: Mapping[str, Value]) -> None:
        dials = {dial.setting.name: dial for dial in (*space.dials, *space.serving_dials)}
        for name, value in settings.items():
            allowed = list(dials[name].values) if name in dials else [DEFAULTS[name]]
            if _setting(name, value) not in allowed:
                raise InputError(
                    f"setting {name}", value, "changes nothing here or is not admitted", f"use one of {allowed}"
                )


def _bound(argument: PartArgument, known: Mapping[str, PartSource]) -> PartUse:
    if argument.source is None:
        if argument.name not in known:
            raise InputError(
                "part", argument.name, "is not known", f"give its source; {nearest(argument.name, list(known))}"
            )
        source = known[argument.name]
    else:
        source = PartSource(name=argument.name, files=(("part.py", argument.source), *argument.files.items()))
    return declaration(source).bind(source, argument.params)


def _setting(name: str, value: Value) -> Value:
    """As its own type; the default may be what nobody could choose, as no number of threads."""
    return value if name in DEFAULTS and value == DEFAULTS[name] else check_setting(name, value)


def _clash(space: Space, option: Option, other: Option) -> bool:
    same_place = space.place_of(option) is space.place_of(other)
    return option.key == other.key or same_place or space.clashes(option, [other])


def by_claim(table: SlotTable) -> list[tuple[str, Slot, int]]:
    """Slots that differ in their layer alone as one row: (claim pattern, the first of them, how many)."""
    groups: dict[str, list[Slot]] = {}
    for slot in table.slots:
        pattern = ".".join("*" if piece.isdigit() else piece for piece in slot.name.split("."))
        groups.setdefault(pattern, []).append(slot)
    return [(claim, group[0], len(group)) for claim, group in groups.items()]
