"""hypothesis: how honest bytes become others.

Two kinds of change: bytes are cut out and put in anywhere, and values in JSON are replaced
by others, which a change of bytes would hardly ever do. Either is drawn as a few bytes that
say what to do: hypothesis shrinks those as well as anything, and draws them ten times faster
than a tree of strategies.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from tests.verify.fuzz.seeds import CODECS, SEEDS, fields_of, said

Place = tuple[str | int, ...]

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -0.0, 0.5, 2**53 - 1, 2**53, -(2**53), 2**64, 2**40, 2**40 + 1,
    4096, 10**400, 1e308, float("nan"), float("inf"), float("-inf"), "", "d" * 64, "D" * 64,
    "paris", "int4", "\ud800", "\0", "ä" * 50, "x" * 1001, [], {}, [[]], [[0, 1], [5, 3]],
    {"": {}}, {"kind": "int4", "block": 33}, {"kind": "uniform", "step": 1e-9}, {"kind": "int4"},
)  # fmt: skip


def spliced(data: bytes, recipe: bytes) -> bytes:
    """Cuts out up to 15 bytes and puts in up to 15 others, at as many places as there are."""
    while len(recipe) >= 3:
        at, cut, put = int.from_bytes(recipe[:2], "little"), recipe[2] & 15, recipe[2] >> 4
        place = at % (len(data) + 1)
        data = data[:place] + recipe[3 : 3 + put] + data[place + cut :]
        recipe = recipe[3 + put :]
    return data


def value_of(recipe: bytes) -> Any:
    """Reads any JSON value out of some bytes."""
    if not recipe:
        return None
    kind, rest = recipe[0] % 8, recipe[1:]
    if kind == 0:
        return int.from_bytes(rest, "little", signed=True)
    if kind == 1:
        return struct.unpack("<d", rest[:8].ljust(8, b"\0"))[0]
    if kind == 2:
        return rest.decode("latin-1")
    if kind == 3:
        return [value_of(rest[:4]), value_of(rest[4:])]
    if kind == 4:
        return {rest[:2].decode("latin-1"): value_of(rest[2:])}
    return ODD[rest[0] % len(ODD)] if rest else {}


def places(found: Any, here: Place = ()) -> Iterator[Place]:
    """Every place in plain data, and one beside the keys of every object."""
    yield here
    if isinstance(found, dict):
        yield (*here, "another")
        for key, value in found.items():
            yield from places(value, (*here, key))
    if isinstance(found, list):
        for number, value in enumerate(found):
            yield from places(value, (*here, number))


def replaced(found: Any, place: Place, value: Any) -> Any:
    """The same data with another value at one place."""
    if not place:
        return value
    changed = copy.copy(found)
    inside = found.get(place[0]) if isinstance(found, dict) else found[place[0]]
    changed[place[0]] = replaced(inside, place[1:], value)
    return changed


def _with_another(chosen: tuple[bytes, Any, Place], recipe: bytes) -> bytes:
    start, found, place = chosen
    return start + json.dumps(replaced(found, place, value_of(recipe))).encode()


_SPOKEN = [
    (bytes([number]), found, place)
    for number, found in enumerate(said().values())
    for place in places(found)
]
_HEADS = [
    (bytes([2, number]), fields_of(name)[0], place)
    for number, name in enumerate(CODECS)
    for place in places(fields_of(name)[0])
]
RECIPE_BYTES = 24
SEVERAL = 16
"""Inputs made of one draw: drawing takes longer than decoding."""

recipes = st.binary(min_size=SEVERAL * RECIPE_BYTES, max_size=SEVERAL * RECIPE_BYTES)


def _several(make: Callable[[Any, bytes], bytes]) -> Callable[[Any, bytes], list[bytes]]:
    def inputs(chosen: Any, drawn: bytes) -> list[bytes]:
        starts = range(0, len(drawn), RECIPE_BYTES)
        return [make(chosen, drawn[start : start + RECIPE_BYTES]) for start in starts]

    return inputs


def _shapes(name: str, documents: list[tuple[bytes, Any, Place]]) -> st.SearchStrategy[list[bytes]]:
    return st.one_of(
        st.builds(_several(spliced), st.sampled_from(SEEDS[name]()), recipes),
        st.builds(_several(_with_another), st.sampled_from(documents), recipes),
        st.lists(st.binary(max_size=200), min_size=1, max_size=3),
    )


SHAPES = {"frame": _shapes("frame", _HEADS), "message": _shapes("message", _SPOKEN)}
