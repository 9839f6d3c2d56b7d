"""What things cost that a simulation cannot measure itself.

Bits per parameter depend on what training produces, and speeds on the machine, so both were
measured once and are kept here, each with the command that shows it again. A kind that
was never measured counts with the bits of its plain form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class MeasuredValue(NamedTuple):
    value: float
    source: str


WIRE = "diloco bench wire"

BITS_UP = {
    "fp32": MeasuredValue(25.4, WIRE),
    "bf16": MeasuredValue(11.5, WIRE),
    "int8": MeasuredValue(7.09, WIRE),
    "int4": MeasuredValue(2.95, WIRE),
    "uniform": MeasuredValue(2.19, WIRE),
    "sign": MeasuredValue(1.04, WIRE),
    "sparse": MeasuredValue(0.28, WIRE),
}
"""Whole frames of real pseudo-gradients, region to server, headers and checksums included."""

BITS_DOWN = {**BITS_UP, "int8": MeasuredValue(7.2, WIRE), "int4": MeasuredValue(3.04, WIRE)}
"""Deltas between published versions, server to regions."""

BITS_WHOLE = MeasuredValue(25.4, f"{WIRE}, fp32: weights compress no better than pseudo-gradients")
"""A fragment fetched whole: by who is new, or was away for longer than deltas are kept."""

MERGE_VALUES = MeasuredValue(330e6, f"{WIRE}, merge of 8, one core")
"""Contributed values merged in a second, from frames to the next delta frame."""

ENCODE_VALUES = MeasuredValue(1.3e9, f"{WIRE}, encode, one core")
"""Values encoded in a second, at the region."""

CHECK_VALUES = MeasuredValue(1.3e9, f"{WIRE}, decode + add, one core")
"""Values looked at in a second before a contribution is accepted."""

LINE_SHARE = MeasuredValue(0.85, "the least that diloco bench link asks of 1 Gbit/s and 50 ms")
"""Part of a line's rate that bodies get, after headers, acknowledgements and slow starts."""


def bits(codec: Mapping[str, Any], table: Mapping[str, MeasuredValue]) -> float:
    """Bits per parameter that frames of this codec were measured to take."""
    measured = table.get(str(codec.get("kind")))
    return measured.value if measured else 32.0
