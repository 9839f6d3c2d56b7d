"""What a frame says about itself: canonical JSON, checked field by field.

A header comes from the other side of the world, so nothing in it is believed before it
has been checked: every key is present and known, every number finite and in range, every
digest a digest. What a header says and what its kind allows must agree as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from diloco_cli.errors import RegistryError, WireError
from diloco_cli.wire.codecs.protocol import Codec, codecs
from diloco_cli.wire.messages import JsonObject, fault

MOST_HEADER_BYTES = 1 << 20
"""The merged map grows with the number of regions; a mebibyte is room for nine thousand."""

Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
Amount = Annotated[float, Field(ge=0, le=2**53 - 1)]
Balance = Annotated[float, Field(ge=-1, le=2**53 - 1)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MaybeDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
MaybeVectorDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
Region = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?$")]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
ShortName = Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]


@dataclass(frozen=True)
class Header:
    """Everything about a frame but its numbers."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )

    kind: Literal["contribution", "delta", "whole"]
    run: Label
    layout: Digest
    fragment: Annotated[int, Field(ge=0, le=2**20)]
    size: Annotated[int, Field(ge=1, le=2**40)]
    """Values in the whole frame."""

    codec: JsonObject
    """The codec's kind and options, for example `{"kind": "int4", "block": 512}`."""

    base: Count
    """contribution: version adopted; delta: version it is added to; whole: same as version."""

    version: Count
    """delta, whole: version it yields; contribution: same as base."""

    region: Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?)?$")] = ""
    clock: Count = 0
    prev: MaybeDigest = ""
    """contribution: digest of the region's last merged frame of this fragment."""

    tokens: Amount = 0.0
    steps: Amount = 0.0
    part: Annotated[int, Field(ge=0, lt=4096)] = 0
    parts: Annotated[int, Field(ge=1, le=4096)] = 1
    totals: dict[ShortName, Balance] = field(default_factory=dict)
    """contribution: tokens of this fragment by fate; rounding may leave one a hair below 0."""

    cursor: dict[str, Any] = field(default_factory=dict)
    """contribution: where the region's data order stands; plain data."""

    merged: dict[Region, Digest] = field(default_factory=dict)
    """delta, whole: each region's last merged frame, as of `version`."""

    members: list[Region] = field(default_factory=list)
    """delta, whole: regions merged into this very version."""

    published: MaybeVectorDigest = ""
    """delta, whole: digest of the published vector of `version`."""

    @classmethod
    def contribution(
        cls,
        *,
        run: str,
        layout: str,
        fragment: int,
        size: int,
        codec: Mapping[str, Any],
        base: int,
        region: str,
        clock: int = 0,
        prev: str = "",
        tokens: float = 0.0,
        steps: float = 0.0,
        totals: Mapping[str, float] | None = None,
        cursor: Mapping[str, Any] | None = None,
    ) -> Header:
        """The header of a region's pseudo-gradient on version `base`."""
        return cls(
            kind="contribution",
            run=run,
            layout=layout,
            fragment=fragment,
            size=size,
            codec=dict(codec),
            base=base,
            version=base,
            region=region,
            clock=clock,
            prev=prev,
            tokens=tokens,
            steps=steps,
            totals=dict(totals or {}),
            cursor=dict(cursor or {}),
        )


KEYS = [field.name for field in dataclass_fields(Header)]
_headers = TypeAdapter(Header)


def write_header(header: Header, chunks: list[int]) -> bytes:
    """Writes a header and its chunk lengths as canonical JSON that `read_header` accepts."""
    text = json.dumps(
        {**asdict(header), "chunks": chunks},
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    written = text.encode("ascii")
    read_header(written)
    return written


def read_header(data: bytes) -> tuple[Header, list[int], Codec]:
    """Reads a header, its chunk lengths and its codec, or says what is wrong with it."""
    if len(data) > MOST_HEADER_BYTES:
        raise _wrong(f"it has {len(data)} bytes, {MOST_HEADER_BYTES} are allowed")
    try:
        fields = json.loads(
            data, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite
        )
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise _wrong("it is not a JSON object")
    chunks = fields.pop("chunks", None)
    if not isinstance(chunks, list) or not all(type(n) is int and n > 0 for n in chunks):
        raise _wrong("`chunks` is not a list of lengths")
    if missing := [key for key in KEYS if key not in fields]:
        raise _wrong(f"`{missing[0]}` is missing")
    if unknown := [key for key in fields if key not in KEYS]:
        raise _wrong(f"version 1 has no key `{unknown[0][:80]}`")
    try:
        # Through JSON once more: strict checks of plain dicts exist only on that way, and
        # it refuses text (lone surrogates) that could not be written down again.
        header = _headers.validate_json(json.dumps(fields))
    except ValidationError as error:
        raise _wrong(fault(error)) from None
    _agree(header)
    return header, chunks, _codec(header)


def _agree(header: Header) -> None:
    """Refuses fields that are fine alone but not together."""
    if header.part >= header.parts:
        raise _wrong(f"`part` is {header.part} of {header.parts} parts, counted from 0")
    steps = {"contribution": 0, "whole": 0, "delta": 1}[header.kind]
    if header.version != header.base + steps:
        raise _wrong(
            f"a {header.kind} on base {header.base} has version {header.base + steps}, "
            f"not {header.version}"
        )
    if header.kind == "contribution" and not header.region:
        raise _wrong("a contribution names its `region`")
    if header.kind != "contribution" and not header.published:
        raise _wrong(f"a {header.kind} names the `published` digest it leads to")


def _codec(header: Header) -> Codec:
    try:
        return _built(json.dumps(header.codec, sort_keys=True))
    except RegistryError as error:
        raise _wrong(f"`codec`: {error.message}") from None


@lru_cache(maxsize=64)
def _built(codec: str) -> Codec:
    # Checking options takes as long as all the rest of a header, and they hardly ever differ.
    return codecs.build(json.loads(codec))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a key appears twice")
    return keys


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _wrong(why: str) -> WireError:
    return WireError(
        f"The frame's header is wrong: {why}.",
        hint="The two sides run different programs or versions; compare `diloco --version`.",
    )
