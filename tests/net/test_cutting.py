"""How a body is cut for several connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diloco_cli.net.client import Client
from diloco_cli.net.options import PART_BYTES
from diloco_cli.net.transfer.upload import SHORTEST_LAST_PART, Source, Upload

PLENTY = 100 * PART_BYTES


@pytest.fixture
def upload() -> Iterator[Upload]:
    with Client("http://127.0.0.1:9") as client:  # Never connected to.
        client.up.moved(PART_BYTES, 0.01)
        yield Upload(
            Source(bytes(64)),
            "/v1/fragments/0/contributions/paris/0-1",
            lane=client.lane,
            throughput=client.up,
            headers={},
            answer=client.answer,
        )


@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_that_begin_together_do_not_end_together(upload, lanes):
    first = [upload._lengths(number, PLENTY, lanes)[0] for number in range(lanes)]
    assert first == [PART_BYTES, *(PART_BYTES * number // lanes for number in range(1, lanes))]
    assert [upload._lengths(number, PLENTY, lanes)[0] for number in range(lanes)] == [
        PART_BYTES
    ] * lanes


def test_the_last_parts_become_shorter_but_no_crumbs(upload):
    left, lengths = PART_BYTES, []
    while left > 0:
        length, least = upload._lengths(0, left, 2)
        assert least == PART_BYTES // SHORTEST_LAST_PART
        lengths.append(length)
        left -= length
    assert lengths == [PART_BYTES // part for part in (2, 4, 8, 8)]
