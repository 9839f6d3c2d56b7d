"""Limits on many bodies at once, and on bodies that never end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from diloco_cli.server.http.limits import UPLOADS_PER_REGION, Quota
from diloco_cli.server.intake.body import PATIENCE_SECONDS, batches
from diloco_cli.server.refusals import HttpRefusal


def test_a_region_has_so_many_uploads_and_bytes_at_once_and_no_other_pays_for_it():
    quota = Quota(lambda: 1000)
    with ExitStack() as under_way:
        for _ in range(UPLOADS_PER_REGION):
            under_way.enter_context(quota.taken("paris", 10))
        with pytest.raises(HttpRefusal, match="8 uploads under way") as denied:
            under_way.enter_context(quota.taken("paris", 10))
        assert denied.value.status == 503 and denied.value.headers == {"retry-after": "2"}
        under_way.enter_context(quota.taken("tokyo", 10))
    with quota.taken("paris", 1500):
        with pytest.raises(HttpRefusal, match="at most 2000 at once"), quota.taken("paris", 501):
            pass
        with quota.taken("paris", 500):
            pass
    with quota.taken("paris", 5000):  # Alone, its size is for others to judge.
        pass


def test_a_body_that_drips_is_given_up_and_a_slow_one_is_not():
    now = [0.0]

    async def body(pieces: int, size: int, seconds: float) -> AsyncIterator[bytes]:
        for _ in range(pieces):
            now[0] += seconds
            yield b"x" * size

    async def received(pieces: int, size: int, seconds: float) -> int:
        total = 0
        arriving = body(pieces, size, seconds)
        async for batch in batches(arriving, 1 << 30, 60.0, clock=lambda: now[0]):
            total += sum(map(len, batch))
        return total

    assert asyncio.run(received(100, 16384, 1.0)) == 100 * 16384
    with pytest.raises(HttpRefusal, match="less than 8192 per second") as denied:
        asyncio.run(received(100, 1, 1.0))
    assert denied.value.status == 408
    assert now[0] < 100 + PATIENCE_SECONDS + 2
