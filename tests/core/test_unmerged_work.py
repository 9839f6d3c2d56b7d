"""Work is held until it is merged, refused or given up; the books know which, to the token."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.core import unmerged_work
from diloco_cli.core.unmerged_work import DROP, KEEP, Book, Flight, Mix, Posted, Totals, Work

REBASE, REPLACE, BLEND = 1.0, 0.0, 0.5


def trained(steps: int, book: Book | None = None) -> Book:
    book = book or Book(version=4, prev="older")
    for _ in range(steps):
        book = unmerged_work.step(book, 100)
    return book


def flying(steps: int = 3, since: int = 0) -> Book:
    """A book whose frame "x" flies with `steps` steps; `since` more were made after it."""
    book, clock = unmerged_work.post(trained(steps), clock=10)
    return trained(since, unmerged_work.written(book, clock, "x"))


def in_outbox(book: Book) -> Posted:
    flight = book.flight
    assert flight is not None
    return Posted(flight.clock, flight.base, flight.prev, flight.work, flight.digest, book.totals)


# Posting


def test_a_frame_carries_everything_that_is_held():
    book, _ = unmerged_work.post(trained(3), clock=10)
    assert book.flight == Flight(10, 4, "older", Work(300, 3))
    assert book.held == Work(300, 3) and book.fresh == Work()


def test_a_frame_is_never_named_like_the_one_before_it_even_without_a_step():
    returned, _ = unmerged_work.answered(flying(), "x", "returned")
    _, clock = unmerged_work.post(returned, clock=10)
    assert clock == 11


@pytest.mark.parametrize(
    "book, called, answers",
    [
        (trained(1), 4, True),
        (trained(1), 5, True),
        (trained(1), 3, False),
        (trained(1), None, False),
        (trained(0), 4, False),
        (replace(trained(0), held=Work(0, 2)), 4, False),
        (replace(trained(0), held=Work(50, 0.5)), 4, False),
        (flying(), 4, False),
    ],
    ids=["called", "ahead", "over", "uncalled", "no-steps", "no-tokens", "crumbs", "in-flight"],
)
def test_only_a_region_with_work_and_no_frame_in_flight_answers_a_call(book, called, answers):
    assert unmerged_work.may_answer(book, called) is answers


def test_news_about_a_frame_that_is_still_being_written_is_not_news_yet():
    book, _ = unmerged_work.post(trained(3), clock=10)
    assert unmerged_work.answered(book, "", "refused") == (book, KEEP)


def test_a_frame_settled_while_it_was_written_stays_settled():
    book, clock = unmerged_work.post(trained(3), clock=10)
    book, _ = unmerged_work.abandon(book)
    assert unmerged_work.written(book, clock, "x").flight is None


def test_only_the_frame_that_was_written_gets_its_digest():
    book, clock = unmerged_work.post(trained(3), clock=10)
    assert unmerged_work.written(book, clock - 1, "older") == book


# Answers


def test_returned_work_is_still_held():
    book, mix = unmerged_work.answered(flying(3, since=2), "x", "returned")
    assert mix == KEEP and book.flight is None
    assert book.held == Work(500, 5) and book.totals.discarded == 0


def test_refused_work_is_dropped_with_everything_built_on_it():
    book, mix = unmerged_work.answered(flying(3, since=2), "x", "refused")
    assert mix == DROP and book.held == Work()
    assert (book.totals.refused, book.totals.discarded) == (300, 200)


def test_foreign_work_is_dropped_and_counts_as_discarded():
    book, mix = unmerged_work.answered(flying(3, since=2), "x", "foreign")
    assert mix == DROP and (book.totals.refused, book.totals.discarded) == (0, 500)


@pytest.mark.parametrize("fate", ["pending", "merged"])
def test_a_merged_frame_waits_for_the_version_that_contains_it(fate):
    assert unmerged_work.answered(flying(), "x", fate) == (flying(), KEEP)


def test_a_region_of_which_nothing_is_on_record_follows_no_frame():
    """Without that it would wait for a version that says so, and perhaps make none possible."""
    book = replace(flying(3, since=2), prev="w")
    given_up, _ = unmerged_work.answered(book, "x", "foreign")
    assert given_up.prev == "w"
    anew, mix = unmerged_work.answered(book, "x", "foreign", forgotten=True)
    assert anew == replace(given_up, prev="") and mix == DROP


@pytest.mark.parametrize("fate", ["returned", "refused", "foreign"])
def test_an_answer_about_another_frame_changes_nothing(fate):
    assert unmerged_work.answered(flying(), "y", fate) == (flying(), KEEP)


# Adopting


def test_rebase_subtracts_exactly_the_frame_that_was_merged():
    book, mix = unmerged_work.settle(flying(3, since=2), 5, "x", REBASE)
    assert mix == Mix(1.0, 1.0)
    assert (book.version, book.prev, book.held) == (5, "x", Work(200, 2))
    assert book.flight is None and book.totals.applied == 300


def test_rebase_keeps_everything_when_others_were_merged():
    book, mix = unmerged_work.settle(flying(3, since=2), 5, "older", REBASE)
    assert mix == Mix(1.0, 0.0) and book.held == Work(500, 5)
    assert book.flight and book.flight.share == 1


def test_replace_goes_on_from_the_published_weights():
    book, mix = unmerged_work.settle(flying(3, since=2), 5, "older", REPLACE)
    assert mix == Mix(0.0, 0.0) and book.held == Work() and book.totals.discarded == 200
    assert book.pending == 300  # The frame may still be merged.


def test_blend_keeps_a_share_of_what_was_not_merged():
    book, mix = unmerged_work.settle(flying(3, since=2), 5, "x", BLEND)
    assert mix == Mix(0.5, 0.5) and book.held == Work(100, 1) and book.totals.discarded == 100


def test_blend_twice_leaves_a_quarter_of_the_flying_frame_inside():
    once, _ = unmerged_work.settle(flying(4), 5, "older", BLEND)
    twice, _ = unmerged_work.settle(once, 6, "older", BLEND)
    assert twice.flight and twice.flight.share == 0.25 and twice.held == Work(100, 1)
    book, mix = unmerged_work.settle(twice, 7, "x", BLEND)
    assert mix == Mix(0.5, 0.125) and book.held == Work() and book.totals.discarded == 0
    assert book.totals.applied == 400


def test_a_returned_frame_has_lost_what_blending_took_from_it():
    blended, _ = unmerged_work.settle(flying(4), 5, "older", BLEND)
    book, _ = unmerged_work.answered(blended, "x", "returned")
    assert book.held == Work(200, 2) and book.totals.discarded == 200


def test_a_region_with_nothing_in_flight_just_moves_on():
    book, mix = unmerged_work.settle(trained(2), 5, "older", REBASE)
    assert mix == KEEP and book.held == Work(200, 2) and book.prev == "older"


@pytest.mark.parametrize("book", [flying(3, since=2), trained(5)])
@pytest.mark.parametrize("alpha", [REBASE, BLEND])
def test_a_strangers_frame_means_that_only_the_published_weights_are_certain(book, alpha):
    book, mix = unmerged_work.settle(book, 5, "stranger", alpha)
    assert mix == DROP and (book.held, book.flight) == (Work(), None)
    assert (book.prev, book.totals.discarded) == ("stranger", 500)


def test_a_version_never_merges_a_frame_that_has_no_digest_yet():
    book, _ = unmerged_work.post(replace(trained(3), prev=""), clock=10)
    book, mix = unmerged_work.settle(book, 5, "", REBASE)
    assert mix == KEEP and book.flight is not None and book.totals.applied == 0


# Starting


def test_a_trainer_without_any_file_starts_empty():
    assert unmerged_work.start(None, None, REBASE) == (Book(), "nothing")


def test_a_checkpoint_alone_is_taken_as_it_is():
    assert unmerged_work.start(trained(3), None, REBASE) == (trained(3), "checkpoint")


def test_the_outbox_beats_an_older_checkpoint():
    later = flying(5)
    book, origin = unmerged_work.start(trained(3), in_outbox(later), REBASE)
    assert origin == "frame" and book == later


def test_a_lost_checkpoint_is_no_reason_to_forget_a_frame():
    book, origin = unmerged_work.start(None, in_outbox(flying(5)), BLEND)
    assert origin == "frame" and book.flight and book.held == Work(500, 5)


def test_under_replace_a_newer_frame_flies_but_is_not_held():
    book, origin = unmerged_work.start(trained(3), in_outbox(flying(5)), REPLACE)
    assert origin == "nothing" and book.held == Work()
    assert book.flight and book.flight.share == 0 and book.pending == 500


def test_a_checkpoint_that_knows_the_frame_beats_it():
    saved = flying(3, since=2)
    assert unmerged_work.start(saved, in_outbox(saved), REBASE) == (saved, "checkpoint")


def test_a_frame_saved_while_it_was_written_gets_its_digest_from_the_outbox():
    saved, _ = unmerged_work.post(trained(3), clock=10)
    book, _ = unmerged_work.start(saved, in_outbox(flying(3)), REBASE)
    assert book.flight and book.flight.digest == "x"


def test_a_settled_frame_does_not_fly_again():
    saved, _ = unmerged_work.settle(flying(3, since=2), 5, "x", REBASE)
    assert unmerged_work.start(saved, in_outbox(flying(3)), REBASE) == (saved, "checkpoint")


@pytest.mark.parametrize("outbox", [None, replace(in_outbox(flying()), clock=7)])
def test_a_post_that_never_became_durable_counts_as_returned(outbox):
    saved, _ = unmerged_work.post(trained(4), clock=10)
    saved, _ = unmerged_work.settle(saved, 5, "older", BLEND)
    book, origin = unmerged_work.start(saved, outbox, BLEND)
    assert origin == "checkpoint" and book.flight is None
    assert book.held == Work(200, 2) and book.totals.discarded == 200


# Waiting (overlap 0)


def test_with_overlap_0_the_next_step_waits_for_the_version_after_the_frame():
    assert unmerged_work.waits_for([trained(2), flying()], {}) == 1


def test_it_waits_for_the_next_version_whoever_is_in_it():
    book, _ = unmerged_work.settle(flying(), 5, "older", REBASE)
    assert book.flight and unmerged_work.waits_for([book], {0: 5}) is None


def test_it_does_not_wait_with_nothing_in_flight():
    assert unmerged_work.waits_for([trained(2)], {0: 4}) is None


def test_whoever_cannot_answer_an_open_call_makes_a_step_instead_of_waiting():
    assert unmerged_work.waits_for([trained(0), flying()], {0: 4, 1: 4}) is None
    assert unmerged_work.waits_for([trained(1), flying()], {0: 4, 1: 4}) == 1
    assert unmerged_work.waits_for([trained(0), flying()], {0: 3}) == 1  # That call is over.


# Whatever happens


# A run that was rebuilt


def lived(*frames: str, alpha: float = REBASE, after: int = 0) -> Book:
    """A book of which these frames were merged, of two steps each; `after` more are held."""
    book = Book(version=0)
    for clock, frame in enumerate(frames, 1):
        book, at = unmerged_work.post(trained(2, book), clock=10 * clock)
        book = unmerged_work.written(book, at, frame)
        book, _ = unmerged_work.settle(book, clock, frame, alpha)
    return trained(after, book)


def fly(book: Book, frame: str) -> Book:
    book, clock = unmerged_work.post(book, clock=1000)
    return unmerged_work.written(book, clock, frame)


@pytest.mark.parametrize(
    "book, merged, held, lost, mix",
    [
        (fly(lived("a", "b", after=3), "x"), "x", 0, 0, Mix(1, 1)),
        (fly(lived("a", "b", after=3), "x"), "b", 300, 0, KEEP),
        (lived("a", "b", after=3), "b", 300, 0, KEEP),
        (lived("a", "b", after=3), "a", 300, 200, KEEP),
        (fly(lived("a", "b", after=3), "x"), "a", 300, 200, KEEP),
        (lived("a", "b", after=3), "", 300, 400, KEEP),
        (lived("a", "b", after=3), "stranger", 0, 300, DROP),
        (fly(lived("a", "b", after=3), "x"), "stranger", 0, 300, DROP),
    ],
)
def test_a_region_stands_on_a_rebuilt_version_with_what_it_holds(book, merged, held, lost, mix):
    new, done = unmerged_work.realign(book, 1, merged, REBASE)
    assert (new.held.tokens, new.totals.discarded, done) == (held, lost, mix)
    assert new.flight is None and new.prev == merged and new.version == 1
    assert new.totals.applied == 0 and unmerged_work.account(new) == 0
    assert new.lost == lost and unmerged_work.renamed(new).lost == 0


def test_a_region_that_is_set_back_twice_knows_what_was_lost_each_time():
    book, _ = unmerged_work.realign(lived("a", "b", "c", after=1), 2, "b", REBASE)
    assert book.totals.discarded == 200
    again, _ = unmerged_work.realign(book, 1, "a", REBASE)
    assert again.totals == Totals(trained=300, discarded=200) and again.held == Work(100, 1)
    gone, _ = unmerged_work.realign(again, 3, "c", REBASE)
    assert gone.held == Work(), "what came after `a` is not ours any more"


def test_frames_merged_since_the_checkpoint_are_known_from_the_outbox():
    saved, newer = lived("a"), fly(lived("a", "b", after=2), "x")
    book, _ = unmerged_work.start(saved, in_outbox(newer), REBASE)
    back, _ = unmerged_work.realign(book, 1, "a", REBASE)
    assert back.held == Work(200, 2) and back.totals.discarded == 200


def test_only_so_many_merged_frames_are_remembered():
    book = lived(*map(str, range(unmerged_work.MOST_MERGES + 5)))
    assert len(book.merges) == unmerged_work.MOST_MERGES
    assert unmerged_work.realign(trained(1, book), 3, "2", REBASE)[0].held == Work()


# Whatever happens

steps = st.tuples(st.just("step"), st.integers(1, 500))
names = ("post", "write", "returned", "refused", "foreign", "merged", "others", "stranger", "save")
back = st.tuples(st.just("rebuilt"), st.integers(0, 70))
acts = st.lists(st.one_of(steps, back, st.tuples(st.sampled_from((*names, "crash")), st.just(0))))


class Region:
    """Books with their array and files. One token adds 1 to the array, so both must agree."""

    def __init__(self, alpha: float) -> None:
        self.alpha, self.book, self.array, self.clock = alpha, Book(version=0), 0.0, 0
        self.saved: tuple[Book, float] | None = None
        self.draft = Posted(0, 0, "", Work(), "", Totals())
        self.outbox: Posted | None = None
        self.written = 0

    def step(self, tokens: int) -> None:
        self.book, self.array = unmerged_work.step(self.book, tokens), self.array + tokens
        self.clock += 1

    def post(self, _: int) -> None:
        if unmerged_work.may_answer(self.book, self.book.version):
            self.book, self.clock = unmerged_work.post(self.book, self.clock)
            self.draft = in_outbox(self.book)  # Its header is made now, whenever it is written.

    def write(self, _: int) -> None:
        if self.book.flight and not self.book.flight.digest:
            self.written += 1
            self.book = unmerged_work.written(self.book, self.book.posted, f"frame {self.written}")
            self.outbox = replace(self.draft, digest=f"frame {self.written}")

    def fate(self, fate: str) -> None:
        if self.book.flight:
            self.do(*unmerged_work.answered(self.book, self.book.flight.digest, fate))

    def adopt(self, merged: str) -> None:
        self.do(*unmerged_work.settle(self.book, self.book.version + 1, merged, self.alpha))

    def rebuilt(self, age: int) -> None:
        """Stands on a version in which an older frame, the one in flight or a stranger's is last.

        A checkpoint follows at once, and what was posted is not there any more.
        """
        flight, known = self.book.flight, [digest for digest, _ in self.book.merges]
        digests = [flight.digest if flight else "", self.book.prev, "stranger", *known]
        version = max(0, self.book.version - age)
        merged = digests[age % len(digests)]
        self.do(*unmerged_work.realign(self.book, version, merged, self.alpha))
        self.save(0)
        self.outbox = None

    def save(self, _: int) -> None:
        self.saved = self.book, self.array

    def crash(self, _: int) -> None:
        book, array = self.saved or (None, 0.0)
        self.book, origin = unmerged_work.start(book, self.outbox, self.alpha)
        frame = self.outbox.work.tokens if self.outbox else 0.0
        self.array = {"nothing": 0.0, "checkpoint": array, "frame": frame}[origin]

    def do(self, book: Book, mix: Mix) -> None:
        frame = self.book.flight.work.tokens if self.book.flight else 0.0
        self.array = mix.held * self.array - mix.flight * frame
        self.book = book

    def act(self, what: str, tokens: int) -> None:
        flight = self.book.flight
        if what in ("returned", "refused", "foreign"):
            self.fate(what)
        elif what == "merged" and flight and flight.digest:
            self.adopt(flight.digest)
        elif what == "others":
            self.adopt(flight.prev if flight else self.book.prev)
        elif what == "stranger":
            self.adopt(f"stranger at {self.book.version}")
        elif what != "merged":
            getattr(self, what)(tokens)


@settings(deadline=None)
@given(acts=acts, alpha=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_the_books_balance_and_agree_with_the_array_whatever_happens(acts, alpha):
    region = Region(alpha)
    for what, tokens in acts:
        region.act(what, tokens)
        book = region.book
        assert unmerged_work.account(book) == pytest.approx(0, abs=1e-6)
        assert book.held.tokens == pytest.approx(region.array, abs=1e-6)
        assert book.fresh.tokens >= -1e-6 and book.fresh.steps >= -1e-6
        assert min(book.totals.applied, book.totals.refused, book.totals.discarded) >= -1e-6


@settings(deadline=None)
@given(before=st.integers(1, 50), after=st.integers(0, 50))
def test_what_rounding_lost_stays_held_and_travels_with_the_next_frame(before, after):
    held, frame = 0.37 * before, round(0.37 * before)
    book, mix = unmerged_work.settle(flying(before, since=after), 5, "x", REBASE)
    left = mix.held * (held + 0.37 * after) - mix.flight * frame
    assert left == pytest.approx(0.37 * (before + after) - frame)
    assert book.held == Work(100 * after, after)  # The remainder has no steps of its own.


def test_unexplained_tokens_show():
    assert unmerged_work.account(replace(trained(2), totals=Totals(trained=150))) == -50
