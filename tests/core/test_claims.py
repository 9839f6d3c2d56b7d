"""What a region claims counts as far as its credit goes, and time alone fills that."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.core.claims import (
    ALONE,
    CEILING,
    ENOUGH,
    FIRST_CREDIT,
    LEARNING,
    LONGEST_GAP,
    SLACK,
    SOFT,
    Allowance,
    AllowanceClock,
    ClaimTerms,
)
from diloco_cli.core.journal_records import FrameDecided, RegionJoined, RegionPaced, TermsAmended
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.rounds import Receipt
from diloco_cli.core.unmerged_work import Work

CAP, STEP_TOKENS = 72.0, 512.0
WEEK, DAY = 7 * 86400.0, 86400.0


class Server:
    """The records of a server that only judges claims."""

    def __init__(self, *regions: str, joined: float = 0.0, **terms) -> None:
        self.ledger, self.number, self.at, self.clock = Ledger.empty(1), 0, joined, 0
        self.terms = terms
        for region in regions:
            self.record(RegionJoined(region, region, 1, 1, at=joined))

    def record(self, record) -> None:
        self.number += 1
        self.ledger.apply(self.number, record)

    def allowance(self) -> Allowance:
        terms = ClaimTerms(CAP, lambda region: STEP_TOKENS, **self.terms)
        return Allowance([self.ledger.slots[0].claims], self.ledger.paces, terms, at=self.at)

    def claim(self, region: str, steps: float, tokens: float | None = None) -> Work:
        """Accepts a frame, and puts a pace on record if it shows one; says what counts."""
        self.clock += 1
        tokens = steps * STEP_TOKENS if tokens is None else tokens
        receipt = Receipt(region, 0, 0, self.clock, str(self.clock), "", tokens, steps)
        verdict = self.allowance().judge(receipt)
        counted, credit = verdict.counted, verdict.credit
        about = {"at": self.at, "counted": counted, "credit": credit}
        self.record(FrameDecided(receipt, "pending", **about))
        if pace := self.allowance().learnt(region):
            self.record(RegionPaced(region, pace, self.at, CAP))
        return counted

    def train(self, seconds: float, *, every: float = 24.0, **paces: float) -> dict[str, float]:
        """Lets regions train honestly; gives the share of their work that counted."""
        counted = dict.fromkeys(paces, 0.0)
        for _ in range(int(seconds / every)):
            self.at += every
            for region, pace in paces.items():
                counted[region] += self.claim(region, pace * every).steps
        return {region: counted[region] / (pace * seconds) for region, pace in paces.items()}


def learnt(*regions: str, **more: float) -> Server:
    """A server that has the pace of every region on record: one step a second."""
    server = Server(*regions)
    server.train(2 * LEARNING, **(dict.fromkeys(regions, 1.0) | more))
    assert all(server.ledger.paces[region].steps_per_second for region in regions)
    return server


def test_what_is_honest_counts_whole_from_the_first_frame_on():
    server = Server("iowa", "paris", reported={"iowa": 1.0, "paris": 2.0})
    assert server.train(3 * LEARNING, iowa=1.0, paris=2.0) == {"iowa": 1.0, "paris": 1.0}
    assert server.ledger.paces["paris"].steps_per_second == pytest.approx(2.0)


def test_a_short_run_counts_whole_although_one_region_has_hardly_begun():
    """What the slow one has shown in the first seconds says nothing of the other."""
    server = Server("fast", "late", reported={"late": 0.2})
    server.at += 15
    server.claim("late", 4.0)
    for _ in range(10):
        server.at += 0.5
        assert server.claim("fast", 24.0).steps == 24.0


def test_a_week_away_with_honest_work_counts_whole():
    server = learnt("iowa", "paris")
    server.at += WEEK
    assert server.claim("paris", WEEK).steps == WEEK
    assert server.claim("iowa", WEEK).steps == WEEK


def test_a_counter_that_is_off_by_a_thousand_counts_no_more_than_its_pace_allows():
    server = learnt("iowa", "paris")
    share = server.train(DAY, paris=1000.0)["paris"]
    assert 1.24 < 1000 * share < SLACK + 0.01


def test_a_first_frame_that_claims_everything_counts_as_the_others_make_believable():
    server = Server("evil", "iowa", "paris", reported={"iowa": 1.0, "paris": 1.0, "evil": 1e9})
    server.at += 30
    assert server.claim("evil", 1e9).steps == FIRST_CREDIT + CEILING * 30
    assert server.claim("evil", 1e9) == Work(0.0, 0.0)
    server.at += 10
    assert server.claim("evil", 1e9).steps == CEILING * 10


def test_tokens_are_scaled_along_and_never_more_than_the_spec_gives_a_step():
    server = learnt("iowa", "paris")
    credit = server.allowance().credit("paris", 0)
    counted = server.claim("paris", 2 * credit, tokens=2 * credit * STEP_TOKENS / 4)
    assert counted == Work(credit * STEP_TOKENS / 4, credit)
    server.at += 100
    assert server.claim("paris", 10.0, tokens=80.0 * STEP_TOKENS).tokens == 10 * STEP_TOKENS


def test_alone_a_region_counts_up_to_what_any_machine_might_do():
    server = Server("iowa")
    server.at += 10
    assert server.claim("iowa", 1e9).steps == FIRST_CREDIT + 10 * ALONE
    server.train(2 * LEARNING, iowa=1e6)
    assert server.ledger.paces["iowa"].steps_per_second == ALONE


def test_alone_a_region_is_soon_held_to_its_own_pace():
    server = Server("iowa")
    assert server.train(2 * LEARNING, iowa=2.0)["iowa"] == pytest.approx(1.0)
    server.at += WEEK
    assert server.claim("iowa", 1e12).steps == pytest.approx(SLACK * 2 * WEEK, rel=0.01)


def test_a_pace_is_learnt_from_enough_frames_and_time_and_then_never_grows():
    server = Server("iowa", "paris")
    server.at += 5 * LEARNING  # It compiled all that time.
    for _ in range(ENOUGH):
        server.at += LEARNING / ENOUGH
        server.claim("iowa", 10.0)
        server.claim("paris", 10.0)
        assert not server.ledger.paces["paris"].steps_per_second
    server.at += LEARNING / ENOUGH
    server.claim("paris", 10.0)
    pace = server.ledger.paces["paris"].steps_per_second
    assert pace == pytest.approx(10.0 * ENOUGH / LEARNING), "what came before says nothing"
    server.train(10 * DAY, every=3600.0, paris=2 * pace, iowa=pace)
    assert server.ledger.paces["paris"].steps_per_second == pace


def test_a_pause_while_a_pace_is_learnt_does_not_make_it_slow_for_ever():
    server = Server("iowa", "paris", reported={"iowa": 1.0})
    server.train(240.0, iowa=1.0, paris=1.0)
    server.at += 2 * LEARNING
    server.train(240.0, iowa=1.0, paris=1.0)
    assert server.ledger.paces["paris"].steps_per_second == pytest.approx(1.0)


def test_a_learnt_pace_is_no_higher_than_the_others_make_believable():
    server = Server("evil", "iowa", "paris", reported={"iowa": 1.0, "paris": 1.0})
    server.train(2 * LEARNING, evil=1e6, iowa=1.0, paris=1.0)
    assert server.ledger.paces["evil"].steps_per_second == pytest.approx(CEILING)


def test_a_pace_that_is_forgotten_is_learnt_anew():
    server = learnt("iowa", "paris")
    assert server.train(DAY, paris=4.0, iowa=1.0)["paris"] < 0.35
    assert "claims 4.0 × its pace on record" in server.allowance().overclaim("paris")
    server.record(TermsAmended(1, "faster", repace=("paris",), at=server.at))
    assert not server.ledger.paces["paris"].steps_per_second
    server.train(2 * LEARNING, paris=4.0, iowa=1.0)
    assert server.ledger.paces["paris"].steps_per_second == pytest.approx(4.0)
    assert server.train(DAY, paris=4.0, iowa=1.0)["paris"] == pytest.approx(1.0)
    assert not server.allowance().overclaim("paris")


def test_what_counted_before_a_pace_was_forgotten_makes_nobody_else_believable():
    server = learnt("paris")
    server.record(RegionJoined("evil", "evil", 1, 1, at=server.at))
    before = server.allowance().ceiling("evil")
    server.record(TermsAmended(1, "faster", repace=("paris",), at=server.at))
    server.claim("paris", 1.0)
    assert server.allowance().ceiling("evil") <= before


def test_a_pace_in_the_spec_is_taken_as_it_is():
    server = Server("iowa", "paris", declared={"paris": 100.0}, reported={"iowa": 1.0})
    share = server.train(2 * LEARNING, iowa=1.0, paris=100.0)
    assert share["paris"] == pytest.approx(1.0), "although it is a hundred times as fast as iowa"
    assert not server.ledger.paces["paris"].steps_per_second, "nothing is learnt"


def test_a_region_says_how_fast_it_is_only_to_judge_others():
    alone = Server("iowa", reported={"iowa": 1e9})
    assert alone.allowance().rate("iowa") == ALONE
    two = Server("iowa", "paris", reported={"iowa": 1e9, "paris": 1.0})
    assert two.allowance().rate("iowa") == CEILING


def test_before_anybody_has_said_anything_what_counted_tells_the_pace():
    server = Server("iowa", "paris")
    server.at += 40
    server.claim("iowa", 50.0)
    assert server.allowance().rate("paris") == pytest.approx(CEILING * 50 / (40 + SOFT))


@pytest.mark.parametrize(
    ("wall", "passed"), [(1000.0, 0.0), (1060.0, 60.0), (-5e9, 0.0), (9e9, LONGEST_GAP)]
)
def test_a_restart_adds_what_the_wall_clock_says_within_reason(wall, passed):
    assert AllowanceClock(500.0, 1000.0).restarted(wall) == 500.0 + passed


def test_a_clock_that_never_was_on_record_begins_at_nothing():
    assert AllowanceClock().restarted(1.7e9) == 0.0


def test_long_vectors_are_excused_by_believable_steps_only():
    server = learnt("iowa", "paris")
    server.at += 1000.0
    lie, truth = (Receipt("paris", 0, 0, 1, "x", "", 1.0, steps) for steps in (1e9, 900.0))
    assert server.allowance().believable(truth) == 900.0
    assert server.allowance().believable(lie) == server.allowance().credit("paris", 0) < 1e4


def test_a_snapshot_holds_every_claim():
    server = learnt("iowa", "paris")
    server.claim("iowa", 1e9)
    again = Ledger.empty(1)
    again.restore(server.ledger.snapshot())
    assert again == server.ledger


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 1e5),
            st.floats(1.0, 1e15),
            st.sampled_from(("evil", "iowa", "paris")),
        ),
        max_size=60,
    )
)
def test_nobody_counts_more_than_time_allows(events):
    """The bound of the design: cap + 1.25 × pace × time, and before that 8 × the median."""
    server = Server("evil", "iowa", "paris", reported={"iowa": 1.0, "paris": 1.0})
    counted = 0.0
    for seconds, steps, region in events:
        server.at += seconds
        got = server.claim(region, steps if region == "evil" else min(steps, 1.0))
        assert 0.0 <= got.steps <= steps and math.isfinite(got.tokens)
        assert server.allowance().credit(region, 0) >= 0.0
        counted += got.steps if region == "evil" else 0.0
        # The others are never slower than they say, and count one step a frame at most.
        fastest = max(1.0, *(len(events) / (server.at + SOFT), 1.0))
        assert counted <= FIRST_CREDIT + CEILING * fastest * server.at + 1e-6


def test_a_region_that_fell_silent_still_says_how_fast_others_may_be():
    """Its pace is that of the time it was there: it does not fade while others are judged by it."""
    server = Server("iowa", "paris")
    server.at = 60.0
    server.claim("paris", 60.0)
    before = server.allowance().ceiling("iowa")
    server.at = 6 * 3600.0
    assert server.allowance().ceiling("iowa") == before == CEILING * 60.0 / (60.0 + SOFT)
