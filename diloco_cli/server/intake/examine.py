"""What is wrong with a contribution: its address, what it claims, its numbers."""

from __future__ import annotations

import math

import numpy as np

from diloco_cli.core.fragments import Fragment, piece_of
from diloco_cli.core.guard import LARGEST, NOT_FINITE, Norms, inspect, unusual
from diloco_cli.errors import WireError
from diloco_cli.merge.combine import edges_of
from diloco_cli.server.intake.partial import UploadAddress
from diloco_cli.server.settings import ServerSettings
from diloco_cli.wire.chunks import hands
from diloco_cli.wire.codecs import NotFinite
from diloco_cli.wire.frame import Frame

GENEROSITY = 8
"""Times the tokens of a step in the server's spec that a region may claim: it may train
with larger batches than the server knows of. In a round they count no more than those."""


def misaddressed(
    frame: Frame, address: UploadAddress, recipe: ServerSettings, run: str
) -> str | None:
    """Says in what a frame is not what its URL, or this run, says it is."""
    header = frame.header
    size = recipe.sizes[address.fragment]
    for what, found, expected in (
        ("kind", header.kind, "contribution"),
        ("run", header.run, run),
        ("layout", header.layout, recipe.layout.digest),
        ("region", header.region, address.region),
        ("fragment", header.fragment, address.fragment),
        ("size", header.size, size),
        ("base", header.base, address.base),
        ("clock", header.clock, address.clock),
        ("codec", frame.codec, recipe.up),
        ("parts", header.parts, 1),
    ):
        if found != expected:
            return f"the frame's {what} is {found!s:.80}, expected was {expected!s:.80}"
    return None


def examine(
    frame: Frame, fragment: Fragment, norms: Norms, recipe: ServerSettings
) -> tuple[str | None, np.ndarray | None]:
    """Decodes a contribution: says why it must not be merged, or None; and its pieces' squares.

    Where it goes without, the values are not even laid out.
    """
    if why := _dishonest(frame, recipe):
        return why, None
    bounds = {"steps": frame.header.steps, "limit": recipe.spec.server.guard.norm}
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


def _dishonest(frame: Frame, recipe: ServerSettings) -> str | None:
    """Says what is impossible about the work a contribution claims to contain."""
    header = frame.header
    if header.steps < 1 or header.tokens <= 0:
        return f"it claims {header.tokens:g} tokens in {header.steps:g} steps"
    step = recipe.step_tokens[header.region]
    most = GENEROSITY * step
    if header.tokens > most * header.steps:
        return (
            f"it claims {header.tokens:g} tokens in {header.steps:g} steps, but the server's spec "
            f"gives a step of {header.region} {step}"
        )
    return None
