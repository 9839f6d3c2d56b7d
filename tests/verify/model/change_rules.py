"""What a rule is; and the rules of a run that can change: members, lanes, claims, the budget."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from diloco_cli.core import budget, conductor, lanes, ledger, pace
from diloco_cli.core.budget import BudgetStanding
from diloco_cli.core.claims import Allowance, AllowanceClock, ClaimVerdict
from diloco_cli.core.conductor import Attendance
from diloco_cli.core.unmerged_work import Work
from diloco_cli.server.rounds.budget import BudgetRooms
from diloco_cli.spec.schema import GraceSpec
from tests.verify.model.accounts import Heard
from tests.verify.model.amendments import amended
from tests.verify.model.seeded_run import LATE, Misfortune, Setting

Patch = tuple[Any, str, Any]


CRASHES = {"crash": 0.02}
SILENT = {"forget": 14.0}
LOSSES = {"loss": 0.2, "twice": 0.3}
ALL = {"quorum": 4}
BATCH = {"iowa": 4, "lima": 4}
UNEQUAL = {"speeds": {"iowa": 1.0, "lima": 4.0}, "batch": BATCH}
SLOW = {"speeds": {"iowa": 4.0, "lima": 4.0}, "batch": BATCH}
PAIR = {"speeds": {"iowa": 1.0, "lima": 2.0}, "batch": BATCH}
THREE = {"speeds": {**PAIR["speeds"], "paris": 1.0}, "batch": {**BATCH, "paris": 8}}
AT_ONCE = GraceSpec(kind="none")


@dataclass(frozen=True)
class Rule:
    """One rule, how to live without it, and the promises that then break."""

    breaks: str
    patches: tuple[Patch, ...] = ()
    sync: dict[str, Any] = field(default_factory=dict)
    """What runs must be like for the rule to matter often."""
    luck: dict[str, Any] = field(default_factory=dict)
    calm: bool = False
    amended: bool = False
    """Operators amend the runs."""
    late: bool = False
    """Regions join when the run has begun, one after the other."""
    trouble: str = ""
    """What strikes every region in turn, again and again; or lima leaves, once, or those who came
    late are removed. Whoever is `away` is cut off for so long that others read its lanes. With
    every `clock` the server's wall clock is set forward."""

    def focus(self, setting: Setting) -> Setting:
        sync = setting.sync.model_copy(update=self.sync)
        setting = replace(setting, sync=sync, **self.luck)
        if self.late:
            batch = {**setting.batch, **dict.fromkeys(LATE, 4)}
            speeds = {**setting.speeds, **dict.fromkeys(LATE, 1.0)}
            late = tuple((name, 20.0 * turn) for turn, name in enumerate(LATE, 1))
            setting = replace(setting, batch=batch, speeds=speeds, late=late, misfortunes=())
        # Nobody leaves for good who is now needed for the quorum.
        needed = {"leave"} if "quorum" in self.sync else set()
        blows = [blow for blow in setting.misfortunes if blow.kind not in needed]
        blows = self._troubles(setting) if self.trouble else blows
        here = tuple(blow for blow in blows if blow.region in setting.regions)
        sync = sync.model_copy(update={"quorum": min(sync.quorum, len(setting.regions))})
        setting = replace(setting, sync=sync, misfortunes=here)
        return amended(setting) if self.amended else setting

    def _troubles(self, setting: Setting) -> list[Misfortune]:
        if self.trouble == "leave":
            return [Misfortune(40.0, "leave", "lima")]
        if self.trouble == "forgotten":
            folder = ((60.0, "copy", 0.0), (61.0, "cut", 50.0), (105.0, "restore", 0.0))
            return [Misfortune(at, kind, "iowa", length) for at, kind, length in folder]
        if self.trouble == "remove":
            return [Misfortune(40.0 + 20 * turn, "remove", name) for turn, name in enumerate(LATE)]
        found, at, turn = [], 15.0, 0
        while at < setting.quiet:
            region = setting.regions[turn % len(setting.regions)]
            if self.trouble == "restore":
                found.append(Misfortune(at - 15, "copy", region))
            kind, length, pause = self.trouble, 30.0, 17
            if self.trouble == "away":
                kind, length, pause = "cut", 80.0, 60
            if self.trouble == "clock":
                length = 1e6
            found.append(Misfortune(at, kind, region, length))
            at, turn = at + pause, turn + 1
        return found


_DEAL, _DUE, _RETIRE = lanes.deal, pace.due, ledger.Ledger._retire
_UNSENT, _COUNTABLE, _HELD = budget.unsent, budget.countable, BudgetRooms._held
PLENTY = 1e9


def _given_at_once(table: lanes.LaneTable, readers: lanes.Readers) -> lanes.Dealing:
    asked = [lane for each in _DEAL(table, readers).asked.values() for lane in each]
    given = {
        lane: lanes.LanePosition(table.owners[lane].grant, table.owners[lane].position)
        for lane in asked
    }
    return _DEAL(table, replace(readers, released={**given, **readers.released}))


def _begun_again(table: lanes.LaneTable, readers: lanes.Readers) -> lanes.Dealing:
    dealing = _DEAL(table, readers)
    moves = {
        why: tuple(move._replace(at=0) for move in group) if why == "removed" else group
        for why, group in dealing.moves.items()
    }
    return replace(dealing, moves=moves)


def _retired_with_its_work(book: ledger.Ledger, region: str, retirement: Any) -> None:
    for slot in book.slots:
        slot.waiting.pop(region, None)
    _RETIRE(book, region, retirement)


def _all_counts(allowance: Allowance, receipt: Any) -> ClaimVerdict:
    credit = allowance.credit(receipt.region, receipt.fragment)
    return ClaimVerdict(Work(receipt.tokens, receipt.steps), credit)


def _credit_stays(allowance: Allowance, receipt: Any) -> ClaimVerdict:
    credit = allowance.credit(receipt.region, receipt.fragment)
    steps = min(receipt.steps, credit)
    return ClaimVerdict(Work(receipt.tokens * steps / receipt.steps, steps), credit)


def _any_time(clock: AllowanceClock, wall: float) -> float:
    return clock.at + (max(0.0, wall - clock.time) if clock.time is not None else 0.0)


def _due_by_any_report(slots: Any, reports: Any, live: Any, sync: Any, *_: Any) -> list[int]:
    return _DUE(slots, reports, live, sync)


def _all_is_countable(held: Any, allowance: Any, step_tokens: float, resumed: Any) -> float:
    return _UNSENT(held, resumed)


def _drained_of_nothing(held: Any, allowance: Any, step_tokens: float, resumed: Any) -> float:
    return _COUNTABLE(held, allowance, step_tokens, None)


def _holds_nothing(rooms: BudgetRooms, state: Any, region: str) -> list[Any]:
    return [replace(each, pending=0.0) for each in _HELD(rooms, state, region)]


LIAR = {"lies": {"lima": 1e6}, "delay": 0.5, "far": set(), "budget": 6000.0, **PAIR}
FAST = {
    "speeds": {"iowa": 0.3, "lima": 0.3, "paris": 0.3},
    "batch": {"iowa": 4, "lima": 4, "paris": 4},
    "delay": 4.0,
    "budget": 600.0,
}
ALONE = {"speeds": {"iowa": 1.0}, "batch": {"iowa": 4}, "budget": 800.0, "delay": 0.5, "far": set()}

CHANGE_RULES: dict[str, Rule] = {
    # Members
    "what was accepted of the retired stays": Rule(
        "ebx", ((ledger.Ledger, "_retire", _retired_with_its_work),), late=True, trouble="remove"
    ),
    "the removed are barred": Rule("m", late=True, trouble="remove"),
    "nobody waits for the retired": Rule(
        "m", ((Attendance, "of", lambda seen, members: seen),), late=True, trouble="remove"
    ),
    # Lanes
    "a lane is given up before it goes on": Rule(
        "l", ((lanes, "deal", _given_at_once),), {"adopt": "rebase"}, late=True
    ),
    "lanes of the removed go on after what was accepted": Rule(
        "l", ((lanes, "deal", _begun_again),), {"adopt": "rebase"}, late=True, trouble="remove"
    ),
    "reading goes on after the newest frame": Rule(
        "l", (), {"adopt": "rebase"}, {"checkpoint": 20, **CRASHES}
    ),
    # Claims
    "what counts has a credit": Rule("k", ((Allowance, "judge", _all_counts),), luck=LIAR),
    "a credit is used up": Rule("k", ((Allowance, "judge", _credit_stays),), luck=LIAR),
    "the clock goes on by so much at most": Rule(
        "k", ((AllowanceClock, "restarted", _any_time),), luck=LIAR, trouble="clock"
    ),
    "no pace is believed beyond the others'": Rule(
        "k", ((Allowance, "ceiling", lambda allowance, region: PLENTY),), luck=LIAR
    ),
    "headers agree with their books": Rule(
        "k", (), {"quorum": 1}, {**LIAR, "unbalanced": frozenset({"lima"})}
    ),
    "reports count as far as claims": Rule(
        "eo",
        ((pace, "due", _due_by_any_report), (budget, "countable", _all_is_countable)),
        {"quorum": 1},
        LIAR,
    ),
    # The budget
    "what is held is spoken for": Rule(
        "eo",
        ((BudgetRooms, "_held", _holds_nothing), (Heard, "pending", property(lambda heard: 0.0))),
        luck=PAIR,
        calm=True,
    ),
    "the end comes when all is spoken for": Rule(
        "eo", ((BudgetRooms, "unsent", lambda rooms, state, live: {}),), luck=PAIR, calm=True
    ),
    "regions are told how far they may train": Rule(
        "o", ((BudgetRooms, "tell", lambda rooms, state, region: PLENTY),), luck=PAIR, calm=True
    ),
    "room is dealt once": Rule(
        "o", ((BudgetStanding, "room", property(lambda own: 0.0)),), luck=FAST, calm=True
    ),
    "a run that is short goes on": Rule(
        "o", ((conductor, "_resume", lambda *seen: None),), {"quorum": 1}, CRASHES, trouble="lose"
    ),
    "who was drained has nothing": Rule(
        "e",
        ((budget, "countable", _drained_of_nothing),),
        {"quorum": 1},
        {"phantoms": {"lima": 200.0}, **PAIR},
    ),
    "a new owner's books begin anew": Rule(
        "e", (), {"quorum": 1}, {"keeps": 0, **SILENT, **ALONE}, trouble="forgotten"
    ),
    "without step times rounds close as well": Rule(
        "g",
        ((conductor, "_ready", lambda *seen: []),),
        {"quorum": 1, "grace": GraceSpec()},
        {"mute": True, **UNEQUAL},
        calm=True,
    ),
}
