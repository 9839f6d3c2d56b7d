"""The reducer against members that behave as the test says, over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from diloco_cli.bench.baselines.accounts import MeasuredAgainst, StepAccounts, goodput, recovery
from diloco_cli.bench.baselines.messages import (
    CHUNK,
    GRADIENT,
    HEAD,
    STATE,
    TALK,
    MessageHead,
    MessageSocket,
    chunks,
    mean,
)
from diloco_cli.bench.baselines.reducer import GradientReducer, ParallelOptions
from diloco_cli.errors import WireError

VALUES = 2048
"""Two chunks of fp32, so that a member can die between them."""
STEP = 4096
PATIENCE = 30.0


class Actor:
    """A member without a model."""

    def __init__(self, reducer: GradientReducer, region: str, fill: float) -> None:
        end = socket.create_connection(("127.0.0.1", reducer.port), PATIENCE)
        self.line = MessageSocket(end)
        self.gradient = np.full(VALUES, fill, np.float32)
        self.mean = np.zeros(VALUES, np.float32)
        self.state: list[tuple[int, bytes]] = []
        reducer.expect(region, 1)
        self.line.say(
            **{"hello": region, "boot": 1, "bytes": self.gradient.nbytes},
            **{"start": 1.0, "compile": 1.0},
        )

    def hears(self, what: str) -> dict[str, Any]:
        """Receives until this is said."""
        while True:
            head = self.line.head()
            if head.kind == TALK:
                words = self.line.words(head)
                if words["do"] == what:
                    return words
                assert words["do"] != "again", "the exchange was begun anew for no reason"
            elif head.kind == GRADIENT:
                self.line.chunk(head, self.mean.view(np.uint8).data)
            else:
                part = bytearray(head.length)
                self.line.read(memoryview(part))
                self.state.append((head.at, bytes(part)))

    def sends(self, step: int, *, attempt: int = 0, parts: int = 2, loss: float = 1.0) -> None:
        for at, part in list(chunks(self.gradient.view(np.uint8).data))[:parts]:
            self.line.send(MessageHead(GRADIENT, step, attempt, at), part)
        if parts == 2:
            self.line.say(sent=step, attempt=attempt, loss=loss)


Act = Callable[..., Actor]


def begin(*actors: Actor) -> None:
    for actor in actors:
        actor.hears("load")
        actor.line.say(loaded=0, seconds=0.0)
    for actor in actors:
        actor.hears("go")


@contextmanager
def reducer_of(tokens: dict[str, int], **options: Any) -> Iterator[tuple[GradientReducer, Act]]:
    reducer = GradientReducer(list(tokens), StepAccounts(tokens), ParallelOptions(**options))
    reducer.open()
    actors: list[Actor] = []

    def act(region: str, fill: float = 1.0) -> Actor:
        actors.append(Actor(reducer, region, fill))
        return actors[-1]

    try:
        yield reducer, act
    finally:
        reducer.close()
        for actor in actors:
            actor.line.close()
        assert reducer.failure is None


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_members_weigh_by_their_tokens():
    with reducer_of({"a": 100, "b": 300}, elastic=False) as (_, act):
        a, b = act("a", 1.0), act("b", 5.0)
        begin(a, b)
        a.sends(0, loss=2.0)
        b.sends(0, loss=6.0)
        assert [actor.hears("done")["loss"] for actor in (a, b)] == [5.0, 5.0]
        assert (a.mean == 4.0).all() and (b.mean == 4.0).all()


def test_a_death_in_the_middle_of_an_exchange_leaves_no_trace_in_the_mean():
    with reducer_of(dict.fromkeys("abc", 1), elastic=True) as (reducer, act):
        a, b, c = (act(name, fill) for name, fill in zip("abc", (1, 3, 50), strict=True))
        begin(a, b, c)
        c.sends(0, parts=1)
        a.sends(0)
        b.sends(0)
        wait_for(lambda: a.line.head().kind == GRADIENT)  # The first chunk of three is out.
        a.line.read(memoryview(bytearray(STEP)))
        c.line.close()
        for actor in (a, b):
            assert actor.hears("again")["attempt"] == 1
        b.sends(0, attempt=1)
        # What a had still on the way belongs to nothing any more.
        heard = reducer.members["a"].heard
        a.line.send(
            MessageHead(GRADIENT, 0, 0, STEP), np.full(STEP // 4, 70, np.float32).view("B").data
        )
        wait_for(lambda: reducer.members["a"].heard > heard)
        a.sends(0, attempt=1)
        for actor in (a, b):
            actor.hears("done")
            assert (actor.mean == 2.0).all()
        assert reducer.accounts.made[0].members == ("a", "b")


def test_a_death_before_anything_was_averaged_costs_the_others_nothing():
    with reducer_of(dict.fromkeys("ab", 1), elastic=True) as (_, act):
        a, b = act("a", 1.0), act("b", 3.0)
        begin(a, b)
        a.sends(0)
        b.line.close()
        assert a.hears("done")["then"] == "go"
        assert (a.mean == 1.0).all()


def test_who_owes_a_gradient_and_says_nothing_counts_as_dead():
    with reducer_of(dict.fromkeys("ab", 1), elastic=True, silence=2.0) as (reducer, act):
        a, b = act("a", 1.0), act("b", 3.0)
        begin(a, b)
        a.sends(0)
        a.hears("done")
        assert reducer.accounts.made[0].members == ("a",)


def test_an_earlier_start_of_a_region_is_not_let_in():
    with reducer_of(dict.fromkeys("ab", 1), elastic=True) as (reducer, _):
        reducer.expect("a", 2)
        late = MessageSocket(socket.create_connection(("127.0.0.1", reducer.port), PATIENCE))
        late.say(hello="a", boot=1, bytes=8, start=0.0, compile=0.0)
        with pytest.raises(ConnectionError):
            late.head()
        late.close()


def test_a_joiner_gets_the_state_of_another_giver_when_the_first_one_dies():
    with reducer_of(dict.fromkeys("abc", 1), elastic=True) as (reducer, act):
        a, b, c = (act(name) for name in "abc")
        begin(a, b, c)
        c.line.close()
        wait_for(lambda: "c" not in reducer.members)
        late = act("c", 1.0)
        wait_for(lambda: "c" in reducer.waiting)
        for actor in (a, b):
            actor.sends(0)
        for actor in (a, b):
            assert actor.hears("done")["then"] == "hold"
        a.hears("give")
        a.line.send(MessageHead(STATE), b"half of i")
        late.hears("take")
        wait_for(lambda: late.line.head().kind == STATE)
        late.line.read(memoryview(bytearray(9)))
        a.line.close()
        b.hears("give")
        b.line.send(MessageHead(STATE), b"all")
        b.line.say(given=1)
        assert not late.hears("take")["arrived"]
        assert late.hears("take")["arrived"] and late.state == [(0, b"all")]
        late.line.say(loaded=1)
        late.hears("go")
        assert sorted(reducer.members) == ["b", "c"]


def test_bf16_rounds_to_the_nearest_and_keeps_what_is_not_finite():
    exact = np.array([1.0, -2.5, 3.0e38, np.inf, np.nan], np.float32)
    bits = (exact.view(np.uint32) >> 16).astype(np.uint16)
    found = mean([(1.0, bits.data.cast("B"))], "bf16").view(np.uint16)
    assert (found[:4] == bits[:4])[:3].all()
    back = (found.astype(np.uint32) << 16).view(np.float32)
    assert not np.isfinite(back[3:]).any()
    half_way = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    doubled = (half_way.view(np.uint32) >> 16).astype(np.uint16)
    parts = [(0.5, doubled.data.cast("B")), (0.5, (doubled + 1).data.cast("B"))]
    assert mean(parts, "bf16").view(np.uint16).tolist() == [0x3F80, 0x3F82]


def test_a_frame_too_large_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        theirs.sendall(HEAD.pack(GRADIENT, 0, 0, 0, CHUNK + 1))
        with pytest.raises(WireError, match="none of ours"):
            MessageSocket(ours).head()
        theirs.sendall(HEAD.pack(GRADIENT, 0, 0, 4, 8) + bytes(8))
        line = MessageSocket(ours)
        with pytest.raises(WireError, match="beyond"):
            line.chunk(line.head(), memoryview(bytearray(8)))


def test_only_steps_that_are_kept_count():
    accounts = StepAccounts({"a": 10, "b": 10})
    for at in range(11):
        accounts.commit(("a", "b"), float(at), undisturbed=True)
    accounts.back_to(6)
    accounts.commit(("a",), 12.0, undisturbed=False)
    assert (accounts.trained, accounts.applied, accounts.lost) == (210, 110, 5)
    fault_free, shares = goodput(accounts, MeasuredAgainst(20.0, {"a": 1.0, "b": 1.0}))
    assert fault_free == 400
    assert shares["time"] == shares["tokens"] == 110 / 400
    assert shares["participation"] == (5 + 0.5) / 6


def test_without_a_pace_the_usual_step_is_the_measure():
    accounts = StepAccounts({"a": 10, "b": 10})
    for at in (0.0, 2.0, 4.0, 9.0):
        accounts.commit(("a", "b"), at, undisturbed=at != 9.0)
    fault_free, shares = goodput(accounts, MeasuredAgainst(10.0, {}))
    assert fault_free == 100 and shares["tokens"] == 0.6


def test_a_recovery_that_was_struck_again_is_not_counted():
    hello = {"start": 1.0, "compile": 0.5}
    news = [
        (10.1, "lost", "a", {}),
        (13.0, "hello", "a", hello),
        (14.0, "loaded", "a", {"seconds": 0.2}),
        (15.0, "stepped", "a", {}),
    ]
    found = recovery(news, "a", 10.0)
    assert found == pytest.approx(
        {"detect": 0.1, "start": 1.0, "compile": 0.5, "fetch": 0.2, "total": 5.0}
    )
    assert recovery(news, "a", 10.0, until=14.5) is None
    assert recovery(news, "b", 10.0) is None
