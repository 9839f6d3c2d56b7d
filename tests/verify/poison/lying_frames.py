"""Frames whose headers say anything: what can one credential do to the run?

The real checks, journal and merges. One region of three seals frames of which hypothesis makes up
the headers, every field of them, beside two that make one step a second and say so. After every
turn all of this must hold, or the program ends with the shortest lies that break it:

* every honest frame is accepted, counts in full and is merged; no lane of an honest region moves;
* what counts of the liar's claims, and so what it takes from the budget, is at most what time and
  pace give it, and so is its weight in every round;
* the run goes on, all weights are finite, everybody may join and report, `status` can be written;
* a restarted server has the same state, and a replay gives every version to the bit.

    python -m tests.verify.poison.lying_frames --frames 100000
    python -m tests.verify.poison.lying_frames --frames 5000 --http    through the HTTP calls
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from diloco_cli.core.claims import CEILING, FIRST_CREDIT, GENEROSITY, SLACK
from diloco_cli.core.rounds import Accept
from diloco_cli.errors import WireError
from diloco_cli.observe.status import Status
from diloco_cli.server.build_status import build_status, build_summary
from diloco_cli.server.intake.partial import UploadAddress
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.wire.frame import open_frame
from diloco_cli.wire.header import KEYS
from diloco_cli.wire.messages import contribution_path
from tests.server.harness import LEASE, TEXT, close_server, replayed
from tests.server.http.requests import client_of, error, put
from tests.server.lying import CAP, STEP_TOKENS, Trial, pieces, totals
from tests.wire.forged_frames import put_together, taken_apart

LIAR, HONEST = "evil", ("iowa", "paris")
MOST = 2**53 - 1
"""The largest number that a header can say."""


# What a header may say


@dataclass(frozen=True)
class Times:
    """So many times what would be true."""

    factor: float


@dataclass(frozen=True)
class Plus:
    """So much more than would be true."""

    amount: int


@dataclass(frozen=True)
class Honest:
    """What an honest region says in this place."""

    region: str


FACTORS = st.sampled_from([0.0, 1e-12, 0.5, 1 + 1e-12, 1.01, 2.0, 7.0, 8.0, 9.0, 1e3, 1e9, 1e15])
AMOUNTS = st.sampled_from([-(2**53), -1000, -2, -1, 1, 2, 3, 64, 10**6, 2**40, 2**53])
EXTREMES = st.sampled_from(
    [0, -0.0, -1, 1, 0.5, 1e-300, 2**31, 2**53 - 2, MOST, 2**53, 2**64, 10**30, 1e308]
)
NUMBERS = st.one_of(FACTORS.map(Times), AMOUNTS.map(Plus), EXTREMES, st.floats(), st.integers())
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
NAMES = st.sampled_from([*HONEST, "oslo", "", "(others)", "EVIL", "evil ", "e" * 64])
OTHERS = st.sampled_from(HONEST).map(Honest)
GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
    EXTREMES,
)
POSITIONS = st.dictionaries(
    st.one_of(st.integers(0, 9), st.sampled_from([-1, 4095, 4096, 2**53])).map(str),
    st.tuples(
        st.one_of(st.integers(0, 12), EXTREMES), st.one_of(st.integers(0, 500), EXTREMES)
    ).map(list),
    max_size=8,
)
CURSORS = st.fixed_dictionaries(
    {
        "order": st.one_of(st.just(TEXT.digest), st.text(max_size=4)),
        "count": st.one_of(st.just(TEXT.lanes), st.sampled_from([1, 2, 4, 16, 4096]), GARBAGE),
        "lanes": st.one_of(POSITIONS, GARBAGE),
        "released": st.one_of(st.just({}), POSITIONS, GARBAGE),
    }
)
SUMS = st.dictionaries(
    st.sampled_from(["trained", "applied", "refused", "discarded", "pending", "x", "A"]),
    NUMBERS,
    max_size=6,
)
CODECS = st.sampled_from(
    [
        {"kind": "fp32"},
        {"kind": "int4", "block": 64},
        {"kind": "int8"},
        {"kind": "int4", "block": 2**40},
        {"kind": "none"},
        {"kind": "int4", "block": -1},
        {},
    ]
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "kind": st.sampled_from(["delta", "whole", "contributions", ""]),
    "run": st.sampled_from(["trial-0", "", "x" * 200]),
    "layout": HEX,
    "fragment": NUMBERS,
    "size": NUMBERS,
    "codec": CODECS,
    "base": NUMBERS,
    "version": NUMBERS,
    "region": st.one_of(OTHERS, NAMES),
    "clock": NUMBERS,
    "prev": st.one_of(OTHERS, HEX, st.just("")),
    "tokens": NUMBERS,
    "steps": NUMBERS,
    "part": NUMBERS,
    "parts": NUMBERS,
    "totals": SUMS,
    "cursor": st.one_of(OTHERS, CURSORS, st.dictionaries(st.text(max_size=4), GARBAGE)),
    "merged": st.dictionaries(NAMES, HEX, max_size=3),
    "members": st.lists(NAMES, max_size=3),
    "published": st.text("0123456789abcdef", min_size=32, max_size=32),
    "chunks": st.lists(st.integers(-1, 2**40), max_size=3),
}
assert set(FIELDS) == {*KEYS, "chunks"}, "every field of a header is lied about"
IN_RANGE = st.one_of(
    FACTORS.map(Times),
    st.sampled_from([1, 1.5, 64, 2400.0, 1e9, 2.0**52, MOST]),
    st.floats(0, MOST),
)
LANE_POSITIONS = st.dictionaries(
    st.integers(0, 7).map(str),
    st.tuples(st.integers(0, 12), st.one_of(st.integers(0, 500), st.just(MOST))).map(list),
    max_size=8,
)
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "tokens": IN_RANGE,
    "steps": IN_RANGE,
    "clock": st.one_of(st.sampled_from([1, 64, 2**40]).map(Plus), st.just(MOST)),
    "prev": OTHERS,
    "totals": st.fixed_dictionaries(
        {name: IN_RANGE for name in ("trained", "applied", "refused", "discarded")}
    ),
    "cursor": st.fixed_dictionaries(
        {
            "order": st.just(TEXT.digest),
            "count": st.sampled_from([TEXT.lanes, TEXT.lanes, 4]),
            "lanes": LANE_POSITIONS,
            "released": st.one_of(st.just({}), LANE_POSITIONS),
        }
    ),
}
"""Lies that look like headers, in fields where one may get through."""


@dataclass(frozen=True)
class Lie:
    """One frame."""

    changes: dict[str, Any]
    consistent: bool
    """The totals agree with the tokens, so that nothing contradicts itself."""
    addressed: bool
    """The URL says what the header says."""
    older_epoch: bool


@st.composite
def lies(draw: st.DrawFn) -> Lie:
    plausible = draw(st.sampled_from([True, True, False]))
    fields = PLAUSIBLE if plausible else FIELDS
    chosen = draw(st.lists(st.sampled_from(list(fields)), min_size=1, max_size=3, unique=True))
    changes = {
        name: draw(fields[name] if plausible else st.one_of(fields[name], fields[name], GARBAGE))
        for name in chosen
    }
    rare = st.integers(0, 31).map(lambda number: number == 31)
    addressed = plausible or draw(st.booleans())
    return Lie(changes, plausible or draw(st.booleans()), addressed, draw(rare))


@dataclass(frozen=True)
class Turn:
    """So many seconds of everybody's work, and what the liar sends in them."""

    seconds: float
    lies: list[Lie]
    read: dict[str, list[int]]
    given_up: dict[str, list[int]]
    """What its heartbeat says of its lanes."""


TURNS = st.lists(
    st.builds(
        Turn,
        st.sampled_from([4.0, 6.0, 9.0, 30.0, 90.0]),
        st.lists(lies(), min_size=1, max_size=8),
        LANE_POSITIONS,
        LANE_POSITIONS,
    ),
    min_size=1,
    max_size=10,
)


def forged(honest: bytes, lie: Lie, others: dict[str, dict[str, Any]]) -> bytes:
    """An honest frame of the liar's with another header, lengths and digest right."""
    fields, chunks = taken_apart(honest)
    for key, said in lie.changes.items():
        fields[key] = _said(said, fields.get(key), key, others)
    if lie.consistent and "totals" not in lie.changes and _is_number(fields["tokens"]):
        applied = fields["totals"].get("applied", 0.0)
        fields["totals"] = {**fields["totals"], "trained": applied + fields["tokens"]}
    return put_together(fields, chunks)


def _said(said: Any, truth: Any, key: str, others: dict[str, dict[str, Any]]) -> Any:
    match said:
        case Times(factor) if _is_number(truth):
            return truth * factor
        case Plus(amount) if _is_number(truth):
            return truth + amount
        case Honest(region):
            return region if key == "region" else others[region].get(key, "")
        case Times() | Plus():
            return truth
        case dict():
            return {name: _said(each, 0.0, name, others) for name, each in said.items()}
        case _:
            return said


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The run that is lied to


class Lied(Trial):
    """A run with one liar, and what must hold of it."""

    client: httpx.AsyncClient | None = None
    """Lies go through the HTTP calls, if there is one."""

    def __init__(self, folder: Path, pace: float | None) -> None:
        server = {"grant": 1e6}
        super().__init__(folder, paces={LIAR: pace} if pace else {}, server=server)
        self.pace, self.frames, self.answers = pace, 0, Counter[str]()
        self.sent = dict.fromkeys(HONEST, 0.0)
        self.held = {name: [0.0] * len(self.settings.sizes) for name in HONEST}
        self.headers: dict[str, dict[str, Any]] = {name: {} for name in HONEST}
        self.lanes: dict[str, dict[int, tuple[int, int]]] = {}
        self.closed = 0

    async def begin(self) -> None:
        for region in self.regions.values():
            region.order = TEXT
        await self.join()
        for name in HONEST:
            self.lanes[name] = await self._told(name)
        self.began = self.clock.now

    async def _told(self, name: str) -> dict[int, tuple[int, int]]:
        lanes = (await self.beat(name)).lanes
        assert lanes is not None
        return dict(lanes.lanes)

    async def play(self, number: int, turn: Turn) -> None:
        fragment = number % len(self.settings.sizes)
        self.clock.now += turn.seconds
        for name in HONEST:
            self.held[name] = [steps + turn.seconds for steps in self.held[name]]
            await self.beat(name, self.held[name], step_seconds=1.0, step=100)
        await self._report_lies(turn)
        await self.settle()
        for name in HONEST:
            if name not in self.state.ledger.slots[fragment].waiting:
                await self._contribute(name, fragment)
        for lie in turn.lies:
            await self._send(fragment, lie, turn.seconds)
        await self.settle()
        self._check()

    async def _contribute(self, name: str, fragment: int) -> None:
        region, steps = self.regions[name], self.held[name][fragment]
        self.held[name][fragment] = 0.0
        moved = {lane: (grant, at + 1) for lane, (grant, at) in self.lanes[name].items()}
        self.lanes[name] = moved
        lanes = {str(lane): list(at) for lane, at in moved.items()}
        cursor = {"order": TEXT.digest, "count": TEXT.lanes, "lanes": lanes, "released": {}}
        said = totals(region, fragment, steps * STEP_TOKENS)
        data = region.frame(fragment, steps, totals=said, cursor=cursor)
        answer = await self.upload(name, data)
        assert isinstance(answer, Accept), f"an honest frame of {name}: {answer}"
        worth = self.state.ledger.slots[fragment].waiting[name].worth
        assert (worth.steps, worth.tokens) == (steps, steps * STEP_TOKENS), f"{name}: {worth}"
        self.sent[name] += steps * STEP_TOKENS * self.settings.sizes[fragment]
        self.headers[name] = taken_apart(data)[0]

    async def _report_lies(self, turn: Turn | None = None) -> None:
        """The liar's heartbeat: whatever makes the most of its claims."""
        evil = self.regions[LIAR]
        for sums in (evil.trained, evil.applied, evil.pending):
            sums[:] = [min(max(0.0, each), float(MOST)) for each in sums]
        lanes, released = (turn.read, turn.given_up) if turn else ({}, {})
        order = {"order": TEXT.model_dump(), "count": TEXT.lanes}
        read = {int(lane): tuple(at) for lane, at in lanes.items()}
        given = {int(lane): tuple(at) for lane, at in released.items()}
        said = {**order, "lanes": read, "released": given}
        await self.beat(LIAR, 1e9, step_seconds=1e-9, step=100, reading=said)

    async def _send(self, fragment: int, lie: Lie, seconds: float) -> None:
        evil = self.regions[LIAR]
        before = evil.trained[fragment], evil.pending[fragment], evil.sent.get(fragment)
        evil.applied[fragment] = min(evil.applied[fragment], MOST / 2)
        honest = evil.frame(fragment, seconds, totals=totals(evil, fragment, seconds * STEP_TOKENS))
        data = forged(honest, lie, self.headers)
        self.frames += 1
        self.kept.append(data)
        fate = await self._fate(lie, honest, data)
        self.answers[fate] += 1
        if fate == "Accept":
            header = open_frame(data).header
            evil.sent[fragment] = data
            evil.clock = min(max(evil.clock, header.clock), MOST - 1000)
            evil.trained[fragment] = before[0] + header.tokens
            evil.pending[fragment] = before[1] + header.tokens
        else:
            evil.trained[fragment], evil.pending[fragment], sent = before
            evil.sent.pop(fragment, None)
            evil.sent |= {} if sent is None else {fragment: sent}

    async def _fate(self, lie: Lie, honest: bytes, data: bytes) -> str:
        address = address_of(lie, honest, data, self.regions[LIAR].epoch)
        if self.client:
            return await self._answered(self.client, address, data)
        try:
            answer = await self.intake.take(address, pieces(data), length=len(data))
        except HttpRefusal as refusal:
            return refusal.code
        return type(answer).__name__

    async def _answered(
        self, client: httpx.AsyncClient, address: UploadAddress, data: bytes
    ) -> str:
        path = contribution_path(address.fragment, LIAR, address.base, address.clock)
        response = await put(client, data, path=path, epoch=address.epoch)
        assert response.status_code < 500, response.text
        return "Accept" if response.status_code == 201 else error(response)["code"]

    def _check(self) -> None:
        seconds, sizes, ledger = self.clock.now - self.began, self.settings.sizes, self.state.ledger
        rate = SLACK * self.pace if self.pace else CEILING
        most = (FIRST_CREDIT + rate * seconds) * (1 + 1e-9)
        for fragment, slot in enumerate(ledger.slots):
            counted = slot.applied.get(LIAR, 0.0)
            assert counted <= most * STEP_TOKENS, f"fragment {fragment}: {counted} in {seconds} s"
            foreign = (slot.applied.keys() | slot.waiting.keys()) - {LIAR, *HONEST}
            assert not foreign, f"{foreign} took part"
        (table,) = ledger.orders.values()
        for name in HONEST:
            merged = sum(
                size * (slot.applied.get(name, 0.0) + _waits(slot, name))
                for size, slot in zip(sizes, ledger.slots, strict=True)
            )
            assert merged == self.sent[name], f"{name}: {merged} of {self.sent[name]}"
            owned = {lane: tuple(at) for lane, at in table.owned(name).items()}
            # What the liar gave up may have gone to them.
            mine = {lane: at for lane, at in owned.items() if lane in self.lanes[name]}
            assert mine == self.lanes[name], f"the lanes of {name}: {owned}"
        read = sum(owner.position for owner in table.owners.values()) * TEXT.sequence
        honest = sum(at for own in self.lanes.values() for _, at in own.values()) * TEXT.sequence
        assert read - honest <= GENEROSITY * most * STEP_TOKENS, f"{read - honest} tokens are read"
        assert not ledger.end and not ledger.finished, f"the run ended: {ledger.end}"
        assert not ledger.quarantined() & set(HONEST)
        self._check_weights()
        for newest in self.state.weights.newest:
            assert np.isfinite(newest.state.published).all()
        status = build_status(self.server, "here")
        Status.model_validate_json(status.model_dump_json())
        assert status.tokens.pending >= 0 and math.isfinite(status.tokens.trained)
        assert build_summary(self.server).tokens

    def _check_weights(self) -> None:
        """In no round does the liar weigh more than the cap gives a region of its batch."""
        rounds = [fields for kind, fields in self.noted if kind == "closed"]
        for fields in rounds[self.closed :]:
            weights = dict(zip(fields["members"], fields["weights"], strict=True))
            honest = min((weights[name] for name in HONEST if name in weights), default=None)
            assert all(math.isfinite(each) and each > 0 for each in weights.values()), weights
            if honest is not None and LIAR in weights:
                assert weights[LIAR] <= CAP * STEP_TOKENS * STEP_TOKENS * (1 + 1e-9), weights
        self.closed = len(rounds)

    async def end(self) -> None:
        """Everybody may join again, and what is on record gives the same bits."""
        self.clock.now += 2 * LEASE
        for name, region in self.regions.items():
            region.boot += 1
            await self.join(name)
            await (self._report_lies() if name == LIAR else self.beat(name))
        await self.settle()
        await self.amend(remove=[LIAR])
        await self.settle()
        for name in HONEST:
            # They read its lanes from now on: wherever those stand, there is a next window.
            told = await self._told(name)
            await self.reads(name, {lane: (grant, at + 1) for lane, (grant, at) in told.items()})
        ledger, digests = self.state.ledger, self.digests()
        self.restart()
        assert self.state.ledger == ledger and self.digests() == digests
        await close_server(self.server)
        openable = [data for data in self.kept if _opens(data)]
        again = replayed(self.settings, self.folder, openable)
        assert [state.digest for state in again] == digests


def _waits(slot: Any, name: str) -> float:
    held = [each[name].worth.tokens for each in (slot.waiting, slot.closing) if name in each]
    return sum(held)


def _opens(data: bytes) -> bool:
    with contextlib.suppress(WireError):
        return bool(open_frame(data))
    return False


def address_of(lie: Lie, honest: bytes, data: bytes, epoch: int) -> UploadAddress:
    """Where the liar sends it; its name is what its credential says."""
    truth, said = taken_apart(honest)[0], taken_apart(data)[0]

    def number(key: str) -> int:
        fits = type(said[key]) is int and 0 <= said[key] <= MOST
        return said[key] if lie.addressed and fits else truth[key]

    where = {"base": number("base"), "clock": number("clock")}
    return UploadAddress(truth["fragment"], LIAR, **where, epoch=epoch - lie.older_epoch)


async def lied_to(
    folder: Path, turns: Sequence[Turn], pace: float | None, *, http: bool = False
) -> Lied:
    run = Lied(folder, pace)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(run.server.publisher.settled)
        if http:
            run.client = await stack.enter_async_context(client_of(run))
        await run.begin()
        for number, turn in enumerate(turns):
            await run.play(number, turn)
        await run.end()
    return run


def tell_lies(
    frames: int, *, first_seed: int = 0, batch: int = 100, http: bool = False
) -> Iterator[Counter[str]]:
    """Sends so many lies, in runs that hypothesis draws; gives the answers so far."""
    answers = Counter[str]()
    number = first_seed
    while answers.total() < frames:

        @seed(number)
        @settings(
            max_examples=batch,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(TURNS, st.sampled_from([None, 1.0]))
        def trial(turns: list[Turn], pace: float | None) -> None:
            with tempfile.TemporaryDirectory() as folder:
                run = asyncio.run(lied_to(Path(folder), turns, pace, http=http))
            answers.update(run.answers)

        trial()
        number += 1
        yield answers


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--http", action="store_true", help="through the server's HTTP calls")
    options = parser.parse_args()
    began, answers = time.monotonic(), Counter[str]()
    for answers in tell_lies(options.frames, first_seed=options.seed, http=options.http):
        said = {"frames": answers.total(), "seconds": round(time.monotonic() - began)}
        print(json.dumps({**said, "answers": dict(answers.most_common())}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
