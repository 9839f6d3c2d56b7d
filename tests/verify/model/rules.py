"""The protocol with one rule taken away, to see what the rule is for.

A rule that lives in the shells is switched off by name inside the model. A rule that
lives in the core is switched off by putting a wrong variant in its place; the product
has no switches. Three rules are not here because nothing breaks without them while the
others hold: refusals that stick, a second worker that waits for the lease, and a post
that ticks the clock. They are second fences and cost one comparison each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from diloco_cli.core import conductor, ledger, pace, rounds, unmerged_work
from diloco_cli.spec.schema import GraceSpec
from tests.verify.model.seeded_run import Misfortune, Setting

Patch = tuple[Any, str, Callable[..., Any]]

_ADMIT, _START, _ANSWERED, _POST = (
    rounds.admit,
    unmerged_work.start,
    unmerged_work.answered,
    unmerged_work.post,
)
_DECIDE, _ADMIT_WORKER = rounds.decide, ledger.admit_worker


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
    book: unmerged_work.Book, digest: str, fate: str
) -> tuple[unmerged_work.Book, unmerged_work.Mix]:
    if fate == "merged" and book.flight and book.flight.digest == digest:
        return unmerged_work.settle(book, book.version, digest, 1.0)
    return _ANSWERED(book, digest, fate)


def _keep_what_was_refused(
    book: Any, digest: str, fate: str
) -> tuple[unmerged_work.Book, unmerged_work.Mix]:
    return _ANSWERED(book, digest, "returned" if fate == "refused" else fate)


def _all_that_is_posted_flies(saved: Any, outbox: Any, alpha: float) -> Any:
    book, origin = _START(saved, outbox, alpha)
    if outbox and book.flight is None and outbox.clock == book.posted:
        flight = unmerged_work.Flight(
            outbox.clock, outbox.base, outbox.prev, outbox.work, outbox.digest
        )
        book = replace(book, flight=flight)
    return book, origin


def _always_a_new_epoch(member: Any, owner: str, boot: int, *, lease_left: float) -> Any:
    if member and member.owner == owner:
        return ledger.Admitted(member.epoch + 1, new=True)
    return _ADMIT_WORKER(member, owner, boot, lease_left=lease_left)


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


def _calls_for_ever(book: ledger.Ledger) -> dict[int, int]:
    return {f: slot.version for f, slot in enumerate(book.slots) if slot.phase == "called"}


def _waits_whatever_is_called(books: Any, calls: Any) -> int | None:
    waiting = [f for f, b in enumerate(books) if b.flight and b.flight.base == b.version]
    return waiting[0] if waiting else None


@dataclass(frozen=True)
class Rule:
    """One rule, how to live without it, and the promises that then break."""

    breaks: str
    patches: tuple[Patch, ...] = ()
    sync: dict[str, Any] = field(default_factory=dict)
    """What runs must be like for the rule to matter often."""
    luck: dict[str, Any] = field(default_factory=dict)
    calm: bool = False
    trouble: str = ""
    """What strikes every region in turn, again and again; or lima leaves, once."""

    def focus(self, setting: Setting) -> Setting:
        sync = setting.sync.model_copy(update=self.sync)
        setting = replace(setting, sync=sync, **self.luck)
        # Nobody leaves for good who is now needed for the quorum.
        needed = {"leave"} if "quorum" in self.sync else set()
        blows = [blow for blow in setting.misfortunes if blow.kind not in needed]
        blows = self._troubles(setting) if self.trouble else blows
        here = tuple(blow for blow in blows if blow.region in setting.regions)
        sync = sync.model_copy(update={"quorum": min(sync.quorum, len(setting.regions))})
        return replace(setting, sync=sync, misfortunes=here)

    def _troubles(self, setting: Setting) -> list[Misfortune]:
        if self.trouble == "leave":
            return [Misfortune(40.0, "leave", "lima")]
        found, at, turn = [], 15.0, 0
        while at < setting.quiet:
            region = setting.regions[turn % len(setting.regions)]
            if self.trouble == "restore":
                found.append(Misfortune(at - 15, "copy", region))
            found.append(Misfortune(at, self.trouble, region, 30.0))
            at, turn = at + 17, turn + 1
        return found


def _admit(variant: Callable[..., Any]) -> Patch:
    return rounds, "admit", variant


CRASHES = {"crash": 0.02}
LOSSES = {"loss": 0.2, "twice": 0.3}
ALL = {"quorum": 4}
BATCH = {"iowa": 4, "lima": 4}
UNEQUAL = {"speeds": {"iowa": 1.0, "lima": 4.0}, "batch": BATCH}
SLOW = {"speeds": {"iowa": 4.0, "lima": 4.0}, "batch": BATCH}
PAIR = {"speeds": {"iowa": 1.0, "lima": 2.0}, "batch": BATCH}
THREE = {"speeds": {**PAIR["speeds"], "paris": 1.0}, "batch": {**BATCH, "paris": 8}}
AT_ONCE = GraceSpec(kind="none")

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
    "boot number": Rule("h", ((ledger, "admit_worker", _always_a_new_epoch),), luck=LOSSES),
    "calls durable": Rule("e", luck=CRASHES),
    "recorded answer first": Rule("abx", (_admit(_forgetful),), luck=LOSSES),
    "decided when journaled": Rule("abx", luck=LOSSES),
    "journal before reply": Rule("e", luck=CRASHES),
    "exact chain": Rule("c"),
    "drain without quorum": Rule("e", ((conductor, "need", _always_a_quorum),), sync=ALL),
    "end waits for the lapsed": Rule("e", sync={"quorum": 1}, trouble="cut"),
    "finished calls nobody": Rule(
        "e", ((ledger.Ledger, "calls", _calls_for_ever),), {"quorum": 1}, trouble="cut"
    ),
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
    "answer before adopting": Rule(
        "f",
        (),
        {"adopt": "replace", "quorum": 1, "every": 1, "staleness": 3, "grace": AT_ONCE},
        {"delay": 0.1, "budget": 400.0, "far": set(), **UNEQUAL},
        calm=True,
    ),
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
