"""What is wrong with a contribution: its address, what it claims, its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from diloco_cli.core.claims import GENEROSITY
from diloco_cli.core.fragments import Fragment, piece_of
from diloco_cli.core.guard import LARGEST, NOT_FINITE, Norms, inspect, unusual
from diloco_cli.errors import WireError
from diloco_cli.merge.combine import edges_of
from diloco_cli.server.intake.partial import UploadAddress
from diloco_cli.server.terms import TermsHistory
from diloco_cli.wire.chunks import hands
from diloco_cli.wire.codecs import NotFinite
from diloco_cli.wire.frame import Frame

ROUNDING = 1e-9
"""Share of a sum by which two ways to add it up may differ: a blend leaves parts of tokens."""


@dataclass(frozen=True, slots=True)
class BelievedClaim:
    """What the server knows itself of the work that a contribution claims."""

    steps: float
    """That may excuse how long its vector is."""
    merged: float
    """Tokens of the sender's folder that are merged into this fragment."""


def misaddressed(
    frame: Frame, address: UploadAddress, history: TermsHistory, run: str
) -> str | None:
    """Says in what a frame is not what its URL, or this run, says it is.

    Its region may have packed it under any terms that the run has had.
    """
    header, settings = frame.header, history.newest
    codec = frame.codec if frame.codec in history.up_codecs else settings.up
    size = settings.sizes[address.fragment]
    for what, actual, expected in (
        ("kind", header.kind, "contribution"),
        ("run", header.run, run),
        ("layout", header.layout, settings.layout.digest),
        ("region", header.region, address.region),
        ("fragment", header.fragment, address.fragment),
        ("size", header.size, size),
        ("base", header.base, address.base),
        ("clock", header.clock, address.clock),
        ("codec", frame.codec, codec),
        ("parts", header.parts, 1),
    ):
        if actual != expected:
            return f"the frame's {what} is {actual!s:.80}, expected was {expected!s:.80}"
    return None


def examine(
    frame: Frame,
    fragment: Fragment,
    norms: Norms,
    history: TermsHistory,
    believed: BelievedClaim,
) -> tuple[str | None, np.ndarray | None]:
    """Decodes a contribution: says why it must not be merged, or None; and its pieces' squares.

    Where it goes without, the values are not even laid out.
    """
    if why := _dishonest(frame, history, believed):
        return why, None
    bounds = {"steps": believed.steps, "limit": history.newest.spec.server.guard.norm}
    try:
        squares = frame.squares(edges_of(fragment), threads=hands(fragment.size, None))
        length = math.sqrt(float(squares.sum()))
        if not length <= LARGEST:  # One of its values may be as large: it gets a closer look.
            return inspect(frame.values(), fragment, norms, **bounds), squares
    except NotFinite as error:
        piece = piece_of(fragment, error.index)
        where = f"{piece.tensor} (rows {piece.start}:{piece.stop})"
        return f"{where} has the value {error.value}, which is {NOT_FINITE}", None
    except WireError as error:
        return error.message, None
    return unusual(length, norms, **bounds), squares


def _dishonest(frame: Frame, history: TermsHistory, believed: BelievedClaim) -> str | None:
    """Says what is impossible about the work a contribution claims to contain."""
    header = frame.header
    claim = f"it claims {header.tokens:g} tokens in {header.steps:g} steps"
    if header.steps < 1 or header.tokens < header.steps:
        return claim
    step = history.most_step_tokens(header.region)
    if header.tokens > GENEROSITY * step * header.steps:
        return f"{claim}, but the server's spec gives a step of {header.region} {step}"
    return _unbalanced(frame, believed.merged)


def _unbalanced(frame: Frame, merged: float) -> str | None:
    """Says where a header's totals contradict its own claim, or what the server has merged.

    A frame carries all that its sender holds, so its tokens are what its totals leave over.
    Less merged than here is no lie: a folder whose place another one took gives up frames that
    are merged all the same.
    """
    header, totals = frame.header, frame.header.totals
    if not totals:
        return None
    trained, applied = totals.get("trained", 0.0), totals.get("applied", 0.0)
    left = trained - applied - totals.get("refused", 0.0) - totals.get("discarded", 0.0)
    if abs(left - header.tokens) > ROUNDING * max(1.0, trained):
        return (
            f"it claims {header.tokens:.10g} tokens, but its totals leave {left:.10g} "
            f"of {trained:.10g} trained"
        )
    if applied - merged > ROUNDING * max(1.0, merged):
        return (
            f"its totals say that {applied:.10g} tokens of its folder are merged, "
            f"but {merged:.10g} are"
        )
    return None
