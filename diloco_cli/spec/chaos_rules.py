"""What can go wrong on purpose, and what cannot: the rules of the `chaos` section.

The section takes no part in what a run computes: regions that pace themselves make the same
steps, only later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from diloco_cli.spec.fault_kinds import FAULT_KINDS
from diloco_cli.spec.quantities import rate_of
from diloco_cli.spec.rules import Path, SpecFault
from diloco_cli.validation import nearest

if TYPE_CHECKING:
    from diloco_cli.spec.schema import FaultSpec, RunSpec

LINK = "For example 10Mbit/50ms: the rate, then the round trip."


def disturbances(spec: RunSpec) -> Iterator[SpecFault]:
    """Yields what cannot be in a spec's `chaos`."""
    if spec.chaos is None:
        return
    names = [region.name for region in spec.regions]
    chaos, at = spec.chaos, ("chaos",)
    if chaos.link is not None:
        yield from _link(chaos.link, (*at, "link"))
    for region, words in chaos.links.items():
        yield from _region(region, names, (*at, "links", region), on_key=True)
        yield from _link(words, (*at, "links", region))
    for number, fault in enumerate(chaos.faults):
        place = (*at, "faults", number)
        if fault.region is not None:
            yield from _region(fault.region, names, (*place, "region"))
        yield from _when(fault, place)
        yield from _how(fault, place)
        if fault.at is not None and fault.at >= chaos.seconds:
            yield SpecFault(
                (*place, "at"),
                f"is {fault.at:g}, but all is over after chaos.seconds: {chaos.seconds:g}",
                "Raise chaos.seconds, or let it happen earlier.",
                ((*at, "seconds"),),
            )


def _region(
    name: str, names: list[str], path: Path, *, on_key: bool = False
) -> Iterator[SpecFault]:
    if name not in names:
        message = f"is {name!r}, which is no region of this run"
        hint = nearest(name, names, "The regions are")
        yield SpecFault(path, message, hint, (("regions",),), on_key=on_key)


def _when(fault: FaultSpec, place: Path) -> Iterator[SpecFault]:
    periodic = fault.at is not None or fault.every is not None
    if periodic == (fault.per_hour is not None):
        message = "says when twice" if periodic else "does not say when it happens"
        hint = "Give per_hour: 60, or every: 300, or at: 40; every and at go together."
        keys = tuple((*place, key) for key in ("per_hour", "every", "at"))
        yield SpecFault(place, f"({fault.kind}) {message}", hint, keys)
    if fault.shape is not None and fault.per_hour is None:
        message = "belongs to per_hour, which is not given, so it would have no effect"
        yield SpecFault((*place, "shape"), message, "Remove it, or give per_hour.")


def _how(fault: FaultSpec, place: Path) -> Iterator[SpecFault]:
    kind, row = fault.kind, FAULT_KINDS[fault.kind]
    if row.strikes == "server" and fault.region is not None:
        yield SpecFault(
            (*place, "region"),
            f"is {fault.region!r}, but a {kind} strikes the server, not a region",
            "Remove region, or choose kill-region.",
        )
    if row.duration == "required" and fault.duration is None:
        hint = "Give it a duration in seconds."
        message = f"({kind}) does not say how long it lasts"
        yield SpecFault(place, message, hint, ((*place, "duration"),))
    if row.duration == "refused" and fault.duration is not None:
        yield SpecFault(
            (*place, "duration"),
            f"is {fault.duration:g}, but a {kind} is over at once",
            "Remove it; kill-region and kill-server can keep something down.",
        )
    for key, owner in ((row.key, kind) for kind, row in FAULT_KINDS.items() if row.key):
        given = getattr(fault, key) is not None
        if given and kind != owner:
            message = f"belongs to {owner}, not to {kind}, so it would have no effect"
            yield SpecFault((*place, key), message, f"Remove {key}.")
        if kind == owner and not given:
            hint = "For example factor: 4." if key == "factor" else LINK
            yield SpecFault(place, f"({kind}) needs a {key}", hint, ((*place, key),))
    if fault.link is not None:
        yield from _link(fault.link, (*place, "link"))


_WORDS = re.compile(
    r"(?P<rate>[^/]+?(?:bit/s)?)(/\d+(\.\d+)?\s*(us|ms|s))?(/(queue|window|reset|out)=[^/]+)*"
)


def _link(words: str, path: Path) -> Iterator[SpecFault]:
    match = _WORDS.fullmatch(words.strip())
    if not match or (match["rate"] != "unlimited" and rate_of(match["rate"]) is None):
        yield SpecFault(path, f"is {words!r}, which is no link", LINK)
