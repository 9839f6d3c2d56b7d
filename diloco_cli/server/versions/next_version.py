"""A closed round becomes the next version.

    payloads, mapped ──decode, chunk by chunk──▶ merge ──▶ outer step ──▶ theta, momentum
    theta − published ──codec──▶ delta frame;   published + decode(delta) ──▶ published

`merge/combine.py` and `merge/outer_step.py` do the arithmetic, on all cores; here is who takes
part and what becomes of those who cannot.

Regions only ever hold `published`, so what the codec loses on the way down stays in
`theta − published` and travels with the next version. The result depends on the old
version and the members alone, to the bit: a server that died in mid-round computes it
again. Nothing that is not finite leaves this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from diloco_cli.core.fragments import Fragment
from diloco_cli.core.guard import outlier, stranger
from diloco_cli.core.rounds import Receipt
from diloco_cli.errors import DilocoError, WireError
from diloco_cli.merge.combine import MemberUnfit, combine, edges_of
from diloco_cli.merge.optimizers import average_share, averaged
from diloco_cli.merge.outer_step import Diverged, MergePlan, outer_step
from diloco_cli.merge.protocols import OuterRound, Vectors, optimizer_at
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store import Payloads
from diloco_cli.server.store.archive import PayloadLost
from diloco_cli.server.store.filed_state import FiledState
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.wire.chunks import CHUNK, span_of, spread
from diloco_cli.wire.codecs import NotFinite, codecs
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Frame, Header, Outline, open_frame, seal


@dataclass(frozen=True)
class Version:
    """One published version of a fragment."""

    number: int
    state: StoredState | FiledState
    """Its vectors, or where they are."""
    digest: str
    """Of the published vector."""
    merged: Mapping[str, str]
    members: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """What was found out about a contribution when it came in."""

    squares: np.ndarray
    """The squared length of every piece."""
    outline: Outline
    """Of its frame, which was hashed then."""

    @property
    def length(self) -> float:
        return math.sqrt(float(self.squares.sum()))


@dataclass(frozen=True)
class Spoiled:
    """Members that cannot be merged, and what becomes of their work."""

    regions: tuple[str, ...]
    fate: Literal["returned", "refused"]
    why: str
    diverged: bool = False
    """Each is sound by itself; what comes out of the outer step is not."""


SAMPLE = 1 << 17
"""Values on which members' directions are compared: chance agrees by 0.003."""


class _Unusable(Exception):
    def __init__(self, spoiled: Spoiled) -> None:
        self.spoiled = spoiled


def next_version(
    recipe: ServerSettings,
    payloads: Payloads,
    old: Version,
    fragment: Fragment,
    receipts: Sequence[Receipt],
    *,
    drain: bool,
    live: int = 0,
    seen: Mapping[str, Seen] | None = None,
) -> tuple[Version, bytes] | Spoiled:
    """Computes the next version and its delta frame, or says who must leave the round first.

    `live` regions could have been members: of few of them the step is in proportion, but in a
    drain, where each brings what it has left. `seen` may hold what was found out about
    payloads, by digest. StoreDamaged if the old version cannot be read.
    """
    seen = seen or {}
    receipts = sorted(receipts, key=lambda receipt: receipt.region)
    regions = tuple(receipt.region for receipt in receipts)
    try:
        members = _opened(recipe, payloads, fragment, receipts, seen)
        weights = [weight for weight, _ in members]
        method = MergePlan(
            recipe.merge,
            optimizer_at(recipe.outer, _round(old, receipts, weights, 0 if drain else live)),
            codecs.build(recipe.spec.wire.down),
            level=recipe.spec.wire.zstd,
            drain=drain,
        )
        known = _lengths_known(recipe, fragment, receipts, members, seen)
        scales = [recipe.scale(receipt) for receipt in receipts]
        merged = combine(method.rule, fragment, members, known, scales=scales)
        del members  # The step takes memory; what they are mapped to can go before.
        before = old.state.load()
        made = outer_step(method, merged, _before(recipe, before, fragment))
    except _Unusable as error:
        return error.spoiled
    except MemberUnfit as error:
        return _unfit(receipts[error.number], error.error)
    except Diverged as error:
        return Spoiled(regions, "refused", str(error), diverged=True)
    except NotFinite as error:
        why = f"merged, it cannot be published: {error.message}"
        return Spoiled(regions, "refused", why, diverged=True)
    digests = {**old.merged, **{receipt.region: receipt.digest for receipt in receipts}}
    average, known = None, made.digests
    if share := average_share(recipe.outer):
        # A drain's small steps are no rounds: counted, they would push the others out.
        average = before.average if drain else None
        if average is None:
            average = averaged(before.average, made.published, old.number + 1, share=share)
        known = (*known, vector_digest(average))
    state = StoredState(made.theta, made.momentum, made.published, average, digests=known)
    version = Version(old.number + 1, state, made.digest, digests, regions)
    return version, seal(
        frame_header(recipe, payloads.run, "delta", fragment, version), made.chunks
    )


def _round(
    old: Version, receipts: Sequence[Receipt], weights: Sequence[float], live: int
) -> OuterRound:
    ages = (weight * (old.number - it.base) for weight, it in zip(weights, receipts, strict=True))
    return OuterRound(
        old.number + 1,
        share=min(1.0, len(receipts) / max(live, 1)),
        age=sum(ages) / sum(weights),
    )


def _before(recipe: ServerSettings, state: StoredState, fragment: Fragment) -> Vectors:
    first = recipe.outer.start(fragment.size)  # Not written to, so it takes no memory.
    # Another kind of optimizer, by an amendment, begins without a past if it needs another.
    momentum = state.momentum if state.momentum.shape == first.shape else first
    return state.theta, momentum, state.published


def _opened(
    recipe: ServerSettings,
    payloads: Payloads,
    fragment: Fragment,
    receipts: Sequence[Receipt],
    seen: Mapping[str, Seen],
) -> list[tuple[float, Frame]]:
    """Gives each member's weight and frame; the frames' numbers stay where they are."""

    def one(number: int) -> tuple[float, Frame]:
        receipt = receipts[number]
        known = seen.get(receipt.digest)
        try:
            # Read from the disk again all the same: after a crash it would have to be.
            data = payloads.payload(receipt.digest)
            if known:
                return recipe.weight(receipt), known.outline.opened(data)
            frame = open_frame(data, size=fragment.size)
            if frame.digest != receipt.digest:
                raise WireError(f"the payload is frame {frame.digest[:12]}")
            return recipe.weight(receipt), frame
        except (PayloadLost, WireError, ValueError) as error:
            raise _Unusable(_unfit(receipt, error)) from error

    unseen = any(receipt.digest not in seen for receipt in receipts)
    return list(spread(one, len(receipts), None if unseen else 1))


def _lengths_known(
    recipe: ServerSettings,
    fragment: Fragment,
    receipts: Sequence[Receipt],
    members: Sequence[tuple[float, Frame]],
    seen: Mapping[str, Seen],
) -> list[np.ndarray]:
    """The squares of each member's pieces; raises for a member too long to be honest."""
    edges, found = edges_of(fragment), []
    for receipt, (_, frame) in zip(receipts, members, strict=True):
        known = seen.get(receipt.digest)
        try:
            found.append(known.squares if known else frame.squares(edges))
        except WireError as error:
            raise _Unusable(_unfit(receipt, error)) from error
    lengths = [
        recipe.scale(receipt) * math.sqrt(float(squares.sum()))
        for receipt, squares in zip(receipts, found, strict=True)
    ]
    steps = [min(receipt.steps, recipe.steps_cap) for receipt in receipts]
    guard = recipe.spec.server.guard
    odd = outlier(lengths, steps, limit=guard.norm)
    if odd is None and guard.agreement > 0 and len(members) > 3:
        odd = stranger(_sample([frame for _, frame in members]), share=guard.agreement)
    if odd:
        number, why = odd
        raise _Unusable(Spoiled((receipts[number].region,), "refused", why))
    return found


def _sample(frames: Sequence[Frame]) -> np.ndarray:
    """Values of every member at the same places: the beginning of one chunk.

    Which chunk follows from the frames themselves, so that nobody knows it beforehand.
    """
    size = frames[0].header.size
    place = int(frames[-1].digest[:8], 16) % -(-size // CHUNK)
    span = span_of(place, size)
    values = np.empty(span.stop - span.start, np.float32)
    rows = np.empty((len(frames), min(values.size, SAMPLE)), np.float32)
    for number, frame in enumerate(frames):
        try:
            frame.read(place, values)
        except WireError as error:
            raise MemberUnfit(number, error) from error
        rows[number] = values[: rows.shape[1]]
    return rows


def _unfit(receipt: Receipt, error: Exception) -> Spoiled:
    """What cannot be read again may be sent again; what was sound and is no number may not."""
    if isinstance(error, NotFinite) or not isinstance(error, DilocoError):
        return Spoiled((receipt.region,), "refused", str(error))
    why = f"the server could not read it again: {error.message}"
    return Spoiled((receipt.region,), "returned", why)


def frame_header(
    recipe: ServerSettings,
    run: str,
    kind: Literal["delta", "whole"],
    fragment: Fragment,
    version: Version,
) -> Header:
    """The header of a frame that carries a version down."""
    delta = kind == "delta"
    return Header(
        kind=kind,
        run=run,
        layout=recipe.layout.digest,
        fragment=fragment.number,
        size=fragment.size,
        codec=dict(recipe.spec.wire.down) if delta else {"kind": "fp32"},
        base=version.number - 1 if delta else version.number,
        version=version.number,
        merged=dict(version.merged),
        members=list(version.members),
        published=version.digest,
    )
