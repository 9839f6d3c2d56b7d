"""The protocol with one rule taken away, to see what the rule is for.

A rule that lives in the shells is switched off by name inside the model. A rule that
lives in the core is switched off by putting a wrong variant in its place; the product
has no switches. Some rules are not here because nothing was seen to break without them while
the others hold: refusals that stick, a second worker that waits for the lease, a post that ticks
the clock, open calls that a finished run takes back, a region that says which end it answers and
how far it was told to train. They are second fences and cost one comparison each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from diloco_cli.core import conductor, lanes, ledger, members, pace, rounds, terms, unmerged_work
from diloco_cli.spec.schema import GraceSpec
from tests.verify.model.change_rules import (
    ALL,
    AT_ONCE,
    CHANGE_RULES,
    CRASHES,
    LOSSES,
    PAIR,
    SILENT,
    SLOW,
    THREE,
    UNEQUAL,
    Patch,
    Rule,
)

_ADMIT, _START, _ANSWERED, _POST = (
    rounds.admit,
    unmerged_work.start,
    unmerged_work.answered,
    unmerged_work.post,
)
_DECIDE, _ADMIT_WORKER, _KNOWN = rounds.decide, members.admit_worker, terms.known
_DEAL, _FOLLOW = lanes.deal, lanes.follow


def _may_answer_again(book: unmerged_work.Book, called: int | None) -> bool:
    return called is not None and called >= book.version and book.held.steps >= 1


def _newest_wins(receipt: Any, record: rounds.RegionRecord, **rest: Any) -> rounds.Answer:
    known = record.known
    if known and known.fate == "pending" and known.digest != receipt.digest:
        record = replace(record, known=replace(known, fate="returned"))
    return _ADMIT(receipt, record, **rest)


def _checkpoint_only(saved: Any, outbox: Any, alpha: float) -> Any:
    newer = outbox and outbox.clock > (saved.posted if saved else -1)
    return _START(saved, None if newer else outbox, alpha)


def _named_by_steps(book: unmerged_work.Book, clock: int) -> tuple[unmerged_work.Book, int]:
    posted, _ = _POST(book, clock)
    assert posted.flight
    name = 1000 * posted.flight.base + int(book.held.steps)
    return replace(posted, flight=replace(posted.flight, clock=name), posted=name), name


def _same_name_same_frame(receipt: Any, record: rounds.RegionRecord, **rest: Any) -> rounds.Answer:
    known = record.known
    if known and known.clock == receipt.clock and rest["epoch"] == record.epoch:
        return rounds.Recorded(known)
    return _ADMIT(receipt, record, **rest)


def _any_predecessor(receipt: Any, record: rounds.RegionRecord, **rest: Any) -> rounds.Answer:
    return _ADMIT(replace(receipt, prev=record.merged), record, **rest)


def _forgetful(receipt: Any, record: rounds.RegionRecord, **rest: Any) -> rounds.Answer:
    known = record.known
    if known and known.digest == receipt.digest:
        record = replace(record, known=None)
    return _ADMIT(receipt, record, **rest)


def _too_old(receipt: Any, record: rounds.RegionRecord, **rest: Any) -> rounds.Answer:
    return _ADMIT(receipt, record, **{**rest, "alpha": 0.0})


def _subtract_at_once(
    book: unmerged_work.Book, digest: str, fate: str, **rest: Any
) -> tuple[unmerged_work.Book, unmerged_work.Mix]:
    if fate == "merged" and book.flight and book.flight.digest == digest:
        return unmerged_work.settle(book, book.version, digest, 1.0)
    return _ANSWERED(book, digest, fate, **rest)


def _keep_what_was_refused(
    book: Any, digest: str, fate: str, **rest: Any
) -> tuple[unmerged_work.Book, unmerged_work.Mix]:
    return _ANSWERED(book, digest, "returned" if fate == "refused" else fate, **rest)


def _follows_for_ever(
    book: Any, digest: str, fate: str, **rest: Any
) -> tuple[unmerged_work.Book, unmerged_work.Mix]:
    return _ANSWERED(book, digest, fate)


def _retired_all_the_same(receipt: Any, record: rounds.RegionRecord, **rest: Any) -> rounds.Answer:
    return _ADMIT(receipt, replace(record, retired=""), **rest)


def _any_clock(receipt: Any, record: rounds.RegionRecord, **rest: Any) -> rounds.Answer:
    return _ADMIT(receipt, replace(record, high=-1), **rest)


def _forgets_the_name(book: ledger.Ledger, region: str, retirement: Any) -> None:
    book.regions.pop(region, None)
    for slot in book.slots:
        for known in (slot.merged, slot.decided):
            known.pop(region, None)


def _as_if_never_retired(*asked: Any, lease_left: float, retired: bool = False) -> Any:
    return _ADMIT_WORKER(*asked, lease_left=lease_left)


def _all_that_is_posted_flies(saved: Any, outbox: Any, alpha: float) -> Any:
    book, origin = _START(saved, outbox, alpha)
    if outbox and book.flight is None and outbox.clock == book.posted:
        flight = unmerged_work.Flight(
            outbox.clock, outbox.base, outbox.prev, outbox.work, outbox.digest
        )
        book = replace(book, flight=flight)
    return book, origin


def _always_a_new_epoch(member: Any, owner: str, boot: int, **rest: Any) -> Any:
    if member and member.owner == owner:
        return members.Admitted(member.epoch + 1, new=True)
    return _ADMIT_WORKER(member, owner, boot, **rest)


def _closes_uncalled(round: rounds.Round, **rest: Any) -> Any:
    if round.called_at is None:
        round = replace(round, called_at=rest["now"], floor=rest["now"])
    return _DECIDE(round, **rest)


def _sliding_window(round: rounds.Round, **rest: Any) -> Any:
    if round.met_at is None and len(round.members) >= rest["need"]:
        round = replace(round, met_at=rest["now"]) if round.called_at is not None else round
    return _DECIDE(round, **rest)


def _always_a_quorum(book: ledger.Ledger, sync: Any) -> int:
    return sync.quorum


def _amended_again(amendments: Any, request: Any) -> Any:
    answer = _KNOWN(amendments, request)
    return None if isinstance(answer, terms.Made) else answer


def _gives_up_what_it_reads(cursor: lanes.Cursor, told: lanes.Assignment, **rest: Any) -> Any:
    """A lane that was never begun is neither read nor given up."""
    unread = set(told.asked) - cursor.lanes.keys()
    begun = {lane: at for lane, at in told.lanes.items() if lane not in unread}
    return _FOLLOW(cursor, replace(told, lanes=begun), **rest)


def _takes_it_up_again(cursor: lanes.Cursor, told: lanes.Assignment, **rest: Any) -> Any:
    given = {lane: at for lane, at in cursor.released.items() if lane in told.asked}
    return _FOLLOW(replace(cursor, released=given), told, **rest)


def _deaf(table: lanes.LaneTable, readers: lanes.Readers) -> lanes.Dealing:
    return _DEAL(table, replace(readers, heard={}))


def _stays_where_it_was(table: lanes.LaneTable, region: str, positions: Any) -> None:
    pass


def _waits_whatever_is_called(books: Any, calls: Any) -> int | None:
    waiting = [f for f, b in enumerate(books) if b.flight and b.flight.base == b.version]
    return waiting[0] if waiting else None


def _admit(variant: Callable[..., Any]) -> Patch:
    return rounds, "admit", variant


RULES: dict[str, Rule] = {
    "one in flight": Rule(
        "abx", ((unmerged_work, "may_answer", _may_answer_again), _admit(_newest_wins)), luck=LOSSES
    ),
    "outbox beats checkpoint": Rule(
        "ab", ((unmerged_work, "start", _checkpoint_only),), luck=CRASHES
    ),
    "outbox kept": Rule("abex", luck=CRASHES),
    "clock names frames": Rule(
        "be",
        ((unmerged_work, "post", _named_by_steps), _admit(_same_name_same_frame)),
        luck={"unreadable": 0.2, **CRASHES},
    ),
    "compare and set": Rule(
        "a",
        (_admit(_any_predecessor),),
        {"every": 2, "fragments": 3, "quorum": 1, "adopt": "rebase", "overlap": 2},
        {"delay": 2.0, "loss": 0.0},
        trouble="restore",
    ),
    "cumulative map": Rule("be", sync={"adopt": "rebase"}, luck=LOSSES),
    "subtract when adopting": Rule("b", ((unmerged_work, "answered", _subtract_at_once),)),
    "settled stays settled": Rule(
        "abe", ((unmerged_work, "start", _all_that_is_posted_flies),), luck=CRASHES
    ),
    "no adopting while writing": Rule(
        "b", sync={"quorum": 1, "grace": AT_ONCE}, luck={"delay": 0.1, **SLOW}
    ),
    "epochs durable": Rule("hx", luck=CRASHES),
    "boot number": Rule("h", ((members, "admit_worker", _always_a_new_epoch),), luck=LOSSES),
    "calls durable": Rule("e", luck=CRASHES),
    "recorded answer first": Rule("abx", (_admit(_forgetful),), luck=LOSSES),
    "decided when journaled": Rule("abx", luck=LOSSES),
    "journal before reply": Rule("e", luck=CRASHES),
    "exact chain": Rule("c"),
    "drain without quorum": Rule("e", ((conductor, "need", _always_a_quorum),), sync=ALL),
    "end waits for the lapsed": Rule("e", sync={"quorum": 1}, trouble="cut"),
    "refused work is dropped": Rule(
        "e", ((unmerged_work, "answered", _keep_what_was_refused),), luck={"poison": 0.02}
    ),
    "only called rounds close": Rule("g", ((rounds, "decide", _closes_uncalled),)),
    "the window never moves": Rule(
        "g",
        ((rounds, "decide", _sliding_window),),
        {"grace": GraceSpec(kind="fixed", seconds=1.5), "fragments": 3, **ALL},
        {"delay": 4.0},
        calm=True,
    ),
    "overlap 0 waits for the next version": Rule(
        "e",
        sync={"overlap": 0, "quorum": 2, "grace": AT_ONCE},
        luck={"far": {"paris"}, **THREE},
        trouble="leave",
    ),
    "who waits still answers": Rule(
        "e",
        ((unmerged_work, "waits_for", _waits_whatever_is_called),),
        {"overlap": 0, "fragments": 3, "quorum": 2},
        {"crash": 0.05, "writing": 3.0, "checkpoint": 20, "quiet": 200.0, **PAIR},
    ),
    "a dropped round is called again": Rule(
        "e",
        ((pace, "_is_unanswered", lambda slot: False),),
        {"overlap": 0, "fragments": 3, "quorum": 1, "grace": AT_ONCE},
        {"unreadable": 0.6, "far": {"iowa"}, "budget": 400.0, **PAIR},
        trouble="leave",
    ),
    "no age limit under rebase": Rule(
        "f",
        (_admit(_too_old),),
        {"adopt": "rebase", "quorum": 1, "staleness": 1, "every": 2},
        {"delay": 0.2, "far": {"iowa"}, "budget": 800.0},
        calm=True,
    ),
    "retired are fenced": Rule("m", (_admit(_retired_all_the_same),), luck=SILENT, trouble="cut"),
    "names are for ever": Rule(
        "abehx", ((ledger.Ledger, "_retire", _forgets_the_name),), luck=SILENT, trouble="cut"
    ),
    "who returns has a new epoch": Rule(
        "eh", ((members, "admit_worker", _as_if_never_retired),), luck=SILENT, trouble="cut"
    ),
    "a forgotten name keeps its clock": Rule(
        "a",
        (_admit(_any_clock),),
        {"adopt": "rebase", "quorum": 1},
        luck={**SILENT, "keeps": 0},
        trouble="cut",
    ),
    "who is forgotten follows no frame": Rule(
        "e",
        ((unmerged_work, "answered", _follows_for_ever),),
        ALL,
        {**SILENT, "keeps": 0},
        trouble="cut",
    ),
    "terms in closed": Rule("d", luck={"crash": 0.02, "unreadable": 0.0}, amended=True),
    "amendments have ids": Rule(
        "t", ((terms, "known", _amended_again),), luck={"loss": 0.3, "twice": 0.3}, amended=True
    ),
    "finished is heard again": Rule("e", luck={"delay": 4.0}, amended=True),
    "asked lanes are named": Rule(
        "efl",
        ((lanes, "follow", _gives_up_what_it_reads),),
        {"quorum": 1},
        {"delay": 0.1, "far": set(), "budget": 3000.0, **PAIR},
        calm=True,
    ),
    "release after a checkpoint": Rule(
        "l",
        (),
        {"adopt": "rebase", "every": 8, "fragments": 1, "overlap": 2},
        {"checkpoint": 20, "crash": 0.05, "poison": 0.0, "unreadable": 0.0, "quiet": 100.0},
        late=True,
    ),
    "given up stays given up": Rule(
        "l", ((lanes, "follow", _takes_it_up_again),), {"adopt": "rebase"}, late=True
    ),
    "silent lanes go on after what was heard": Rule(
        "l",
        ((lanes, "deal", _deaf),),
        {"adopt": "rebase", "quorum": 1},
        {"quiet": 200.0, "delay": 0.5, "budget": 1500.0, **PAIR},
        trouble="away",
    ),
    "an empty disk begins after what was accepted": Rule(
        "l", ((lanes.LaneTable, "accepted", _stays_where_it_was),), trouble="lose"
    ),
    "answer before adopting": Rule(
        "f",
        (),
        {"adopt": "replace", "quorum": 1, "every": 1, "staleness": 3, "grace": AT_ONCE},
        {"delay": 0.1, "budget": 400.0, "far": set(), **UNEQUAL},
        calm=True,
    ),
    **CHANGE_RULES,
}


@contextmanager
def without(name: str | None) -> Iterator[None]:
    """Takes a rule of the core away for a while."""
    patches = RULES[name].patches if name else ()
    running = [mock.patch.object(*patch) for patch in patches]
    for patch in running:
        patch.start()
    try:
        yield
    finally:
        for patch in running:
            patch.stop()
