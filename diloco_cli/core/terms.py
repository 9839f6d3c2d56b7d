"""The terms of a run: its settings after the n-th amendment. May this amendment be made?

Terms 0 are the spec that the run began with; terms n are terms 0 with the changes of amendments
1 to n laid over them, in order. Nothing else ever changes a setting, so whoever has terms 0 and
the journal has every terms that the run has had.

    request ──▶ seen before? ──▶ made after the newest? ──▶ may these keys change? ──▶ record
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco_cli.core.journal_records import Entry, TermsAmended
from diloco_cli.core.lanes import LANES
from diloco_cli.spec.amendable import RULES, ChangeRule, rule_of
from diloco_cli.validation import nearest

Settings = dict[str, Any]
"""A resolved spec as plain data."""


@dataclass(frozen=True, slots=True)
class AmendmentRequest:
    """A change that somebody asks for."""

    id: str
    """Drawn once for each command, so that a retry is not a second amendment."""
    after: int | None = None
    """The number of the terms that the request was made for; None means whatever is newest."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """By dotted key; None takes a key back to its default."""
    add: tuple[Entry, ...] = ()
    remove: tuple[str, ...] = ()
    by: str = ""
    why: str = ""
    undo: int | None = None
    """Take this amendment back; the changes follow from it."""
    repace: tuple[str, ...] = ()
    """Regions whose pace is to be learnt anew."""


@dataclass(frozen=True, slots=True)
class Made:
    """The amendment is on record already; here is the same answer."""

    record: TermsAmended


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Somebody else amended the run in between."""

    newest: int
    since: tuple[TermsAmended, ...]


@dataclass(frozen=True, slots=True)
class AmendmentFault:
    """One thing that an amendment may not do."""

    key: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class KeyChange:
    """One key before and after an amendment."""

    key: str
    before: Any
    after: Any
    rule: ChangeRule

    @property
    def when(self) -> str:
        return self.rule.in_words


def known(amendments: Sequence[TermsAmended], request: AmendmentRequest) -> Made | Overtaken | None:
    """Answers a retry, or a request that was overtaken; None for one that is to be judged."""
    for record in amendments:
        if record.id == request.id:
            return Made(record)
    newest = len(amendments)
    if request.after is not None and request.after != newest:
        return Overtaken(newest, tuple(amendments[request.after :]))
    return None


@dataclass(frozen=True, slots=True)
class Undoing:
    """What an amendment that takes another back has to say."""

    set: Mapping[str, Any]
    add: tuple[Entry, ...]
    remove: tuple[str, ...]


def undo(
    first: Mapping[str, Any], amendments: Sequence[TermsAmended], number: int
) -> Undoing | AmendmentFault:
    """Says what takes amendment `number` back, unless a later one touched the same keys."""
    if not 1 <= number <= len(amendments):
        made = f"the newest is {len(amendments)}" if amendments else "the run has none"
        return AmendmentFault("undo", f"there is no amendment {number}: {made}")
    record, before = amendments[number - 1], overlay(first, amendments[: number - 1])
    if record.repace:
        return AmendmentFault(
            "undo",
            f"amendment {number} let a pace be learnt anew, and the old one is forgotten",
            f"A pace is given with --set regions.{record.repace[0]}.pace=STEPS_PER_SECOND.",
        )
    for later in amendments[number:]:
        for key in touched(later):
            if any(
                f"{key}.".startswith(f"{own}.") or f"{own}.".startswith(f"{key}.")
                for own in touched(record)
            ):
                return AmendmentFault(
                    key,
                    f"was changed again by amendment {later.number}",
                    f"Undo amendment {later.number} first, or set the key with --set.",
                )
    listed = {region["name"]: region for region in before["regions"]}
    return Undoing(
        {key: _value(before, key) for key in record.set},
        tuple(listed[name] for name in record.remove),
        tuple(region["name"] for region in record.add),
    )


def touched(amendment: TermsAmended) -> list[str]:
    """The keys that an amendment names; a region that comes or goes is one."""
    return [
        *amendment.set,
        *(f"regions.{region['name']}" for region in amendment.add),
        *(f"regions.{name}" for name in amendment.remove),
    ]


class SettingsChange(Protocol):
    """What an amendment changes, on record, asked for, or as a region has heard of it."""

    @property
    def set(self) -> Mapping[str, Any]: ...
    @property
    def add(self) -> Iterable[Mapping[str, Any]]: ...
    @property
    def remove(self) -> Collection[str]: ...


def overlay(first: Mapping[str, Any], amendments: Iterable[SettingsChange]) -> Settings:
    """Lays amendments over terms 0, or over a region's own file."""
    settings = copy.deepcopy(dict(first))
    for amendment in amendments:
        regions = [each for each in settings["regions"] if each["name"] not in amendment.remove]
        listed = {each["name"] for each in regions}
        added = [dict(each) for each in amendment.add if each["name"] not in listed]
        settings["regions"] = regions + copy.deepcopy(added)
        for key, value in amendment.set.items():
            put(settings, key, value)
    return settings


def faults_of(
    before: Mapping[str, Any], request: AmendmentRequest, joined: Collection[str] = ()
) -> list[AmendmentFault]:
    """What is wrong with a request, as far as its keys and names tell.

    `joined` are names that may be removed although the spec does not list them.
    """
    names = [each["name"] for each in before["regions"]]
    faults = [*_region_faults(names, request, joined), *_pace_faults(before, request, joined)]
    for key in request.set:
        faults += _key_faults(key, [*names, *(str(each.get("name")) for each in request.add)])
    return faults


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[KeyChange]:
    """Every key whose value differs; a region that came or went is one change."""
    old, new = dict(flat(before)), dict(flat(after))
    names = {f"regions.{each['name']}." for side in (before, after) for each in side["regions"]}
    came_or_went = tuple(name for name in names if (name[:-1] in old) != (name[:-1] in new))
    keys = [
        key
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not key.startswith(came_or_went)
    ]
    return [KeyChange(key, old.get(key), new.get(key), _rule(key)) for key in keys]


def removal(region: str) -> KeyChange:
    """The change that ends the membership of a region that the spec does not list."""
    return KeyChange(f"regions.{region}", True, None, _MEMBERSHIP)


def repacing(region: str, pace: float) -> KeyChange:
    """The change that lets a region's pace be learnt anew."""
    return KeyChange(f"pace of {region}", round(pace, 4) or "unknown", "learnt anew", _MEMBERSHIP)


def _rule(key: str) -> ChangeRule:
    is_a_region = key.startswith("regions.") and key.count(".") == 1
    return _MEMBERSHIP if is_a_region else rule_of(key) or _UNKNOWN


def forbidden(change: KeyChange) -> AmendmentFault | None:
    """Says why a key must stay as it is, where it must."""
    if change.key == "data.lanes" and (fault := _lane_fault(change)):
        return fault
    return None if change.rule.allowed else _refusal(change.key, change.rule)


def reopens(settings: Mapping[str, Any], before: Mapping[str, Any], *, applied: float) -> bool:
    """Says whether these settings leave tokens to train that those before did not."""
    budget = settings["budget"]["tokens"]
    return budget > before["budget"]["tokens"] and budget > applied


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a resolved spec under its dotted key; regions go by name."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    elif path == "regions":
        for region in value:
            yield f"regions.{region['name']}", True
            rest = {key: inner for key, inner in region.items() if key != "name"}
            if rest:
                yield from flat(rest, f"regions.{region['name']}")
    else:
        yield path, value


def _lane_fault(change: KeyChange) -> AmendmentFault | None:
    before, after = change.before or LANES, change.after or LANES
    if after % before == 0:
        return None
    message = f"is {before} and cannot become {after}: a lane can only be cut into equal parts"
    return AmendmentFault(change.key, message, f"For example {2 * before}.")


_MEMBERSHIP = ChangeRule(("server",))
_UNKNOWN = ChangeRule(("never",), "this version does not know the key")


def _refusal(key: str, rule: ChangeRule) -> AmendmentFault:
    never = rule.when == ("never",)
    what = "never changes in a run that has begun" if never else "cannot be amended"
    return AmendmentFault(key, f"{what}: {rule.why}", rule.instead)


def _region_faults(
    names: list[str], request: AmendmentRequest, joined: Collection[str]
) -> Iterator[AmendmentFault]:
    for region in request.add:
        name = region.get("name")
        if not isinstance(name, str):
            yield AmendmentFault("regions", f"{region!r} is a region without a name")
        elif name in names and name not in request.remove:
            yield AmendmentFault(
                f"regions.{name}", "is in the run already", "Change its keys with --set."
            )
    for name in request.remove:
        if name not in names and name not in joined:
            there = ", ".join(dict.fromkeys([*names, *joined]))
            yield AmendmentFault(
                f"regions.{name}", "is not in the run", f"Its regions are {there}."
            )


def _pace_faults(
    before: Mapping[str, Any], request: AmendmentRequest, joined: Collection[str]
) -> Iterator[AmendmentFault]:
    declared = {each["name"]: each.get("pace") for each in before["regions"]}
    for name in request.repace:
        if name in request.remove or (name not in declared and name not in joined):
            there = ", ".join(dict.fromkeys([*declared, *joined]))
            yield AmendmentFault(
                f"regions.{name}", "is not in the run", f"Its regions are {there}."
            )
        elif pace := request.set.get(f"regions.{name}.pace", declared.get(name)):
            yield AmendmentFault(
                f"regions.{name}.pace",
                f"is {pace} in the spec, so nothing is learnt",
                f"Give another with --set regions.{name}.pace=STEPS_PER_SECOND, or null to "
                "have it learnt.",
            )


def _key_faults(key: str, names: list[str]) -> Iterator[AmendmentFault]:
    steps = key.split(".")
    rule = rule_of(key)
    if not all(steps):
        yield AmendmentFault(key, "is no key", "For example sync.quorum.")
    elif rule is None:
        parts = [known for known in RULES if known.startswith(f"{key}.")]
        if parts:
            yield AmendmentFault(
                key, "is a section of the run spec", f"Name a key in it, as in {parts[0]}."
            )
        else:
            hint = nearest(key, [known for known in RULES if "*" not in known], "Known keys")
            yield AmendmentFault(key, "is no key of the run spec", hint)
    elif not rule.allowed:
        yield _refusal(key, rule)
    elif steps[0] == "regions" and steps[1] not in names:
        yield AmendmentFault(
            key,
            f"names the region {steps[1]!r}, which the run does not have",
            f"Its regions are {', '.join(names)}; --add-region adds one.",
        )


def _value(settings: Mapping[str, Any], key: str) -> Any:
    """What stands under a dotted key; None if nothing does."""
    return _nested(settings).get(key)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything under its dotted key, whole sections as well as single values."""
    values: dict[str, Any] = {}

    def walk(at: Mapping[str, Any], path: str) -> None:
        for key, value in at.items():
            values[path + key] = value
            if path + key == "regions":
                for region in value:
                    walk(region, f"regions.{region['name']}.")
            elif isinstance(value, Mapping):
                walk(value, f"{path}{key}.")

    walk(settings, "")
    return values


def put(settings: Settings, key: str, value: Any) -> None:
    """Sets one dotted key; None takes it back to its default."""
    steps = key.split(".")
    at: Any = settings
    if steps[0] == "regions":
        # A region's own file need not list the others.
        found = [each for each in settings["regions"] if each["name"] == steps[1]]
        if not found:
            return
        at, steps = found[0], steps[2:]
    for step in steps[:-1]:
        if not isinstance(at.get(step), dict):
            at[step] = {}
        at = at[step]
    if value is None:
        at.pop(steps[-1], None)
    else:
        at[steps[-1]] = copy.deepcopy(value)
