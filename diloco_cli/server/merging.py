"""A closed round becomes the next version.

    payloads ──decode, one at a time──▶ merge ──▶ outer step ──▶ theta, momentum
    theta − published ──codec──▶ delta frame;   published + decode(delta) ──▶ published

Regions only ever hold `published`, so what the codec loses on the way down stays in
`theta − published` and travels with the next version. The result depends on the old
version and the members alone, to the bit: a server that died in mid-round computes it
again. Nothing that is not finite leaves this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from diloco_cli.core.fragments import Fragment, norm, spans
from diloco_cli.core.outer import outer_step
from diloco_cli.core.rounds import Receipt
from diloco_cli.errors import WireError
from diloco_cli.server.recipe import Recipe
from diloco_cli.server.store import FragmentState, PayloadLost, Store
from diloco_cli.wire.codec import NotFinite, codecs
from diloco_cli.wire.frame import Header, open_frame, pack, vector_digest


@dataclass(frozen=True)
class Version:
    """One published version of a fragment."""

    number: int
    state: FragmentState
    digest: str
    """Of the published vector."""
    merged: Mapping[str, str]
    members: tuple[str, ...]


@dataclass(frozen=True)
class Spoiled:
    """Members that cannot be merged, and what becomes of their work."""

    regions: tuple[str, ...]
    fate: Literal["returned", "refused"]
    why: str


class _Unusable(Exception):
    def __init__(self, spoiled: Spoiled) -> None:
        self.spoiled = spoiled


def next_version(
    recipe: Recipe,
    store: Store,
    old: Version,
    fragment: Fragment,
    receipts: Sequence[Receipt],
    *,
    drain: bool,
) -> tuple[Version, bytes] | Spoiled:
    """Computes the next version and its delta frame, or says who must leave the round first."""
    receipts = sorted(receipts, key=lambda receipt: receipt.region)
    regions = tuple(receipt.region for receipt in receipts)
    members = _decoded(recipe, store, fragment, receipts)
    try:
        # Overflow is looked for below, where it can be named.
        with np.errstate(over="ignore", invalid="ignore"):
            theta, momentum = outer_step(
                fragment,
                recipe.merge,
                recipe.outer,
                old.state.theta,
                old.state.momentum,
                members,
                drain=drain,
            )
            if not (math.isfinite(norm(theta)) and math.isfinite(norm(momentum))):
                return Spoiled(regions, "refused", "merged, it makes weights that are not finite")
            change = theta - old.state.published
            published = _received(recipe, old.state.published, change)
        if not math.isfinite(norm(published)):
            return Spoiled(regions, "refused", "merged, it makes weights that are not finite")
    except _Unusable as error:
        return error.spoiled
    except NotFinite as error:
        return Spoiled(regions, "refused", f"merged, it cannot be published: {error.message}")
    merged = {**old.merged, **{receipt.region: receipt.digest for receipt in receipts}}
    digest = vector_digest(published)
    state = FragmentState(theta, momentum, published)
    version = Version(old.number + 1, state, digest, merged, regions)
    header = frame_header(recipe, store.run, "delta", fragment, version)
    return version, pack(header, change, level=recipe.spec.wire.zstd)


def _decoded(
    recipe: Recipe, store: Store, fragment: Fragment, receipts: Sequence[Receipt]
) -> Iterator[tuple[float, np.ndarray]]:
    """Yields (weight, delta) of one member after another."""
    for receipt in receipts:
        try:
            frame = open_frame(store.payload(receipt.digest), size=fragment.size)
            if frame.digest != receipt.digest:
                raise WireError(f"the payload is frame {frame.digest[:12]}")
            yield recipe.weight(receipt.tokens, receipt.steps), frame.values()
        except (NotFinite, ValueError) as error:
            raise _Unusable(Spoiled((receipt.region,), "refused", str(error))) from error
        except (PayloadLost, WireError) as error:
            why = f"the server could not read it again: {error.message}"
            raise _Unusable(Spoiled((receipt.region,), "returned", why)) from error


def _received(recipe: Recipe, published: np.ndarray, change: np.ndarray) -> np.ndarray:
    """What regions hold after adding the decoded change, in the chunks of the frame."""
    codec = codecs.build(recipe.spec.wire.down)
    result = np.empty_like(published)
    for span in spans(change.size):
        part = change[span]
        result[span] = published[span] + codec.decode(codec.encode(part), part.size)
    return result


def frame_header(
    recipe: Recipe, run: str, kind: Literal["delta", "whole"], fragment: Fragment, version: Version
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
