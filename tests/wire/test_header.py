"""Nothing in a header is believed before it has been checked."""

import json

import pytest

from diloco_cli.errors import WireError
from diloco_cli.wire.frame import open_frame, pack
from tests.wire.forged_frames import (
    delta,
    header,
    honest,
    opened,
    put_together,
    ramp,
    taken_apart,
    with_header,
)

DIGEST = "c" * 64


@pytest.mark.parametrize(
    "key, values",
    {
        "kind": ["update", "", 3, None],
        "run": ["", "two words", "x" * 129, "a/b", 3, "a\n", "ä"],
        "layout": ["", DIGEST[:-1], DIGEST.upper(), DIGEST + "\n", 5],
        "fragment": [-1, 2**21, 1.0, "1", True, None],
        "size": [0, -100, 100.0, "100", True, 2**41],
        "codec": [
            *({}, {"kind": "int9"}, {"kind": ["int4"]}, "int4", None),
            *({"kind": "int4", "block": block} for block in (100, "512", None)),
            {"kind": "int4", "blok": 64},
        ],
        "base": [-1, 41.5, 2**53, "41", False],
        "version": [40, 42, -1],
        "region": ["", "Paris", "-paris", "a/b", "x" * 65, "par\nis", 7],
        "clock": [-1, 1.5, "7", None, 2**53],
        "prev": ["abc", DIGEST[1:], 0, None],
        "tokens": [-1, -1e-9, 1e300, "12", None, True],
        "steps": [-1, "2", None],
        "part": [1, -1, 4096],
        "parts": [0, -1, 5000, 1.0],
        "totals": [{"Trained": 1}, {"trained": -2}, {"trained": "1"}, [], {"trained": None}],
        "cursor": [[], None, "x"],
        "merged": [{"Paris": DIGEST}, {"paris": "abc"}, {"paris": 1}, []],
        "members": [["Paris"], "paris", [1], None],
        "published": ["abc", 1, None],
    }.items(),
)
def test_a_wrong_field_is_refused_by_name(key, values):
    data = honest()
    for value in values:
        with pytest.raises(WireError, match="header is wrong") as refusal:
            open_frame(with_header(data, **{key: value}))
        assert key in refusal.value.message


def test_every_key_is_there_and_no_other():
    fields, chunks = taken_apart(honest())
    for key in fields:
        with pytest.raises(WireError, match=key):
            opened(put_together({k: v for k, v in fields.items() if k != key}, chunks))
    with pytest.raises(WireError, match="no key `colour`"):
        opened(with_header(honest(), colour="blue"))


@pytest.mark.parametrize(
    "change",
    [
        ('"tokens":0.0', '"tokens":NaN'),
        ('"tokens":0.0', '"tokens":Infinity'),
        ('"tokens":0.0', '"tokens":1e999'),
        ('"cursor":{}', '"cursor":{"loss":NaN}'),
        ('"cursor":{}', '"cursor":{"loss":-1e999}'),
        ('"cursor":{}', '"cursor":{"a":1,"a":2}'),
        ('"clock":500', '"clock":500,"clock":500'),
        ('"cursor":{}', '"cursor":{"a":"\\ud800"}'),
        ('"cursor":{}', '"cursor":{"\\ud800":1}'),
        ('"cursor":{}', '"cursor":{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        ('"clock":500', '"clock":' + "9" * 5000),
        ('"run"', "'run'"),
        ("{", "[", 1),
    ],
    ids=lambda change: change[1][:30],
)
def test_json_that_others_might_read_differently_is_refused(change):
    fields, chunks = taken_apart(honest())
    text = json.dumps(fields, separators=(",", ":"))
    assert change[0] in text
    with pytest.raises(WireError, match="header is wrong"):
        opened(put_together(text.replace(*change).encode(), chunks))


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"\xff\xfe", b"{}", b"{" * 200])
def test_headers_that_are_no_object_are_refused(text):
    _, chunks = taken_apart(honest())
    with pytest.raises(WireError, match="header is wrong"):
        opened(put_together(text, chunks))


def test_a_header_beyond_a_mebibyte_is_refused():
    with pytest.raises(WireError):
        opened(with_header(honest(), cursor={"a": "x" * (1 << 20)}))
    with pytest.raises(WireError, match="1048576 are allowed"):
        pack(header(10, cursor={"a": "x" * (1 << 20)}), ramp(10))


@pytest.mark.parametrize(
    "said, why",
    [
        (header(10, version=42), "a contribution on base 41 has version 41, not 42"),
        (delta(10, 4, version=6), "a delta on base 4 has version 5, not 6"),
        (
            header(10, kind="whole", base=4, version=5, published=DIGEST[:32]),
            "on base 4 has version 4",
        ),
        (header(10, region=""), "names its `region`"),
        (delta(10, 4, published=""), "names the `published` digest"),
        (header(10, part=2, parts=2), "`part` is 2 of 2 parts"),
    ],
)
def test_fields_must_agree_with_one_another(said, why):
    with pytest.raises(WireError, match=why):
        pack(said, ramp(10))


def test_packing_refuses_what_opening_would_refuse():
    with pytest.raises(WireError, match="`region`"):
        pack(header(10, region="Paris"), ramp(10))
    with pytest.raises(ValueError, match="Out of range float values"):
        pack(header(10, tokens=float("nan")), ramp(10))


def test_thousands_of_regions_fit_into_a_header():
    merged = {f"region-{n}": DIGEST for n in range(9000)}
    frame = open_frame(pack(delta(10, 4, merged=merged), ramp(10)))
    assert frame.header.merged == merged


def test_the_header_is_canonical_json():
    text = pack(header(10), ramp(10))[24:].split(b"\x28\xb5\x2f\xfd")[0]
    fields = json.loads(text)
    assert text == json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
