"""The mail gets through: whatever the link does, once, and to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from diloco_cli.errors import StoreError
from diloco_cli.net.client import FencedError
from diloco_cli.observe.events import EventLog, read_events
from diloco_cli.observe.metrics_file import read_metrics
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Header, pack
from diloco_cli.wire.messages import (
    Answer,
    Divergence,
    FragmentProgress,
    HeldOut,
    Joined,
    News,
    TrainerProgress,
)
from diloco_cli.worker.agent.average_fetch import AverageFetch
from diloco_cli.worker.agent.published_weights import bring_up
from diloco_cli.worker.agent.sync_threads import Reporting, SyncThreads
from diloco_cli.worker.mailbox import Fate, Image, Mailbox
from tests.worker.fake_server import LAYOUT, SIZE, Counter


@pytest.fixture
def mailbox(tmp_path):
    made = Mailbox(tmp_path / "regions" / "paris")
    made.prepare()
    return made


@pytest.fixture
def courier_of(mailbox, counter, tmp_path, log_lines):
    """Makes a courier of the mailbox as it is by then."""
    made = []

    def make() -> SyncThreads:
        courier = SyncThreads(
            mailbox,
            "paris",
            Joined.model_validate({**counter.news(), "epoch": 1, "high": 5}),
            connect=counter.connect,
            events=EventLog(tmp_path / "events.jsonl", "paris"),
            on_mail=lambda: None,
            on_change=lambda: None,
        )
        made.append(courier)
        return courier

    yield make
    for courier in made:
        courier.close()


@pytest.fixture
def courier(courier_of):
    return courier_of()


def write_frame(mailbox, clock=7, fragment=0):
    header = Header.contribution(
        run="run-1",
        layout=LAYOUT,
        fragment=fragment,
        size=SIZE,
        codec={"kind": "fp32"},
        base=0,
        region="paris",
        clock=clock,
        tokens=10.0,
        steps=1.0,
    )
    data = pack(header, np.ones(SIZE, np.float32))
    mailbox.post(fragment, data)
    return data[-32:].hex()


def test_all_images_are_fetched_at_first(courier, counter, mailbox):
    courier.start()
    assert courier.up_to_date.wait(20)
    assert [mailbox.image_version(number) for number in range(2)] == [0, 0]
    assert "whole 0 0" in counter.asked and "whole 1 0" in counter.asked


def test_newer_versions_come_as_deltas_and_are_the_servers_bits(courier, counter, mailbox):
    courier.start()
    assert courier.up_to_date.wait(20)
    counter.publish(1)
    counter.publish(1)
    counter.wait_for(lambda: mailbox.image_version(1) == 2)
    np.testing.assert_array_equal(mailbox.image(1).weights, counter.weights[1][2])
    assert not [one for one in counter.asked if one.startswith("whole 1") and one != "whole 1 0"]


def test_deltas_that_do_not_add_up_are_replaced_by_the_whole(courier, counter, mailbox, log_lines):
    courier.start()
    assert courier.up_to_date.wait(20)
    counter.lies = True
    counter.publish(0)
    counter.wait_for(lambda: mailbox.image_version(0) == 1)
    np.testing.assert_array_equal(mailbox.image(0).weights, counter.weights[0][1])
    counter.wait_for(lambda: any("do not add up" in line for line in log_lines))


def test_an_image_that_the_disk_has_changed_is_fetched_whole_and_counted(
    mailbox, counter, courier_of, log_lines
):
    wrong = Image(0, {}, vector_digest(counter.weights[0][0]), counter.weights[0][0] + 1)
    mailbox.write_image(0, wrong)
    courier = courier_of()
    courier.start()
    assert courier.up_to_date.wait(20)
    np.testing.assert_array_equal(mailbox.image(0).weights, counter.weights[0][0])
    counter.wait_for(lambda: counter.heartbeats and counter.heartbeats[-1].mended == 1)
    assert any("damaged on disk" in line for line in log_lines)


def test_a_copy_the_server_doubts_and_the_disk_changed_is_replaced(
    courier, counter, mailbox, log_lines
):
    courier.start()
    assert courier.up_to_date.wait(20)
    counter.wait_for(lambda: len(counter.heartbeats[-1].images) == 2)
    held = counter.heartbeats[-1].images
    assert held[0].digest == vector_digest(counter.weights[0][0]) and held[0].version == 0
    spoilt = Image(0, {}, held[0].digest, counter.weights[0][0] + 1)
    mailbox.write_image(0, spoilt)
    counter.tell(mend={0: held[0].digest})
    counter.wait_for(lambda: counter.heartbeats[-1].mended == 1)
    np.testing.assert_array_equal(mailbox.image(0).weights, counter.weights[0][0])
    assert counter.asked.count("whole 0 0") == 2
    assert any("damaged on disk" in line for line in log_lines)


def test_sound_bits_that_the_server_did_not_publish_are_another_history(courier, counter):
    courier.start()
    assert courier.up_to_date.wait(20)
    counter.wait_for(lambda: len(counter.heartbeats[-1].images) == 2)
    held = counter.heartbeats[-1].images
    # An old word, about what was replaced since, means nothing.
    counter.tell(mend={0: "f" * 32})
    counter.publish(1)
    counter.wait_for(lambda: counter.heartbeats[-1].images[1].version == 1)
    assert courier.trouble is None
    counter.tell(mend={0: held[0].digest})
    counter.wait_for(lambda: courier.trouble is not None)
    assert isinstance(courier.trouble, StoreError)
    assert "restored from an older copy" in courier.trouble.message


def test_what_the_server_has_pruned_is_fetched_as_its_newest_version(counter):
    counter.pruned = True
    counter.publish(0)
    counter.publish(0)
    image, why = bring_up(counter.connect(), 0, Image(0, {}, "", counter.weights[0][0]), 1)
    assert image.version == 2 and "no longer there" in why
    np.testing.assert_array_equal(image.weights, counter.weights[0][2])


def test_a_posted_frame_is_sent_and_its_fate_written_down(courier, counter, mailbox):
    counter.decide = lambda frame: Answer(fate="returned", why="too old")
    courier.start()
    digest = write_frame(mailbox)
    courier.wake()
    counter.wait_for(lambda: mailbox.fate(0) == Fate(digest, "returned", "too old"))
    assert [frame.digest for frame in counter.submitted] == [digest] and not courier.unsent()


def test_a_frame_that_the_disk_has_changed_is_named_and_keeps_no_other(courier, counter, mailbox):
    mailbox.post(0, b"no frame")
    write_frame(mailbox, fragment=1)
    courier.start()
    counter.wait_for(lambda: [frame.header.fragment for frame in counter.submitted] == [1])
    damaged = f"uploads do not get through: {mailbox.outbox_file(0)} is damaged: 8 bytes are too"
    counter.wait_for(lambda: damaged in counter.heartbeats[-1].why)
    # News of that fragment are no reason to think that the server is away.
    with counter.change:
        known = {"digest": "3" * 64, "fate": "pending", "why": ""}
        counter.fates = {**counter.fates, 0: known}
        counter.n += 1
        counter.change.notify_all()
    beats = len(counter.heartbeats)
    counter.wait_for(lambda: len(counter.heartbeats) > beats + 1)
    assert not courier.away
    write_frame(mailbox, clock=8)
    courier.wake()
    counter.wait_for(lambda: [frame.header.fragment for frame in counter.submitted] == [1, 0])
    counter.wait_for(lambda: "damaged" not in counter.heartbeats[-1].why)


def test_a_frame_the_server_knows_is_not_sent_again(courier, counter, mailbox):
    digest = write_frame(mailbox)
    counter.fates = {0: {"digest": digest, "fate": "merged"}}
    courier.take(Joined.model_validate({**counter.news(), "epoch": 1, "high": 5}))
    assert courier.unsent() == []


def test_an_answer_about_an_older_frame_does_not_hide_the_newest(courier, counter, mailbox):
    counter.decide = lambda frame: Answer(fate="foreign", why="somebody else")
    courier.start()
    digest = write_frame(mailbox)
    courier.wake()
    counter.wait_for(lambda: mailbox.fate(0) is not None)
    counter.fates = {0: {"digest": "a" * 64, "fate": "merged"}}
    counter.tell()
    counter.wait_for(lambda: courier.news.n == counter.n)
    assert mailbox.fate(0) == Fate(digest, "foreign", "somebody else", forgotten=True)


def test_older_news_does_not_overwrite_newer(courier, counter):
    old = Joined.model_validate({**counter.news(), "epoch": 1, "high": 5})
    counter.tell(end=True)
    courier.take(Joined.model_validate({**counter.news(), "epoch": 1, "high": 5}))
    courier.take(old)
    assert courier.mailbox.calls().end
    courier.take(old, known=old.n)  # Asked for before the newer news came.
    assert courier.mailbox.calls().end


def test_news_of_a_server_that_was_set_back_count_at_once(courier, counter):
    courier.start()
    counter.n = 50
    counter.tell(end=True)
    counter.wait_for(lambda: courier.mailbox.calls().n == 51)
    counter.n = 8
    counter.tell(end=False)
    courier.wake()
    counter.wait_for(lambda: courier.mailbox.calls().n == 9)
    assert not courier.mailbox.calls().end


def test_a_server_that_is_away_is_mentioned_once_and_everything_is_sent_later(
    courier, counter, mailbox, log_lines, tmp_path
):
    courier.trainer = Reporting()
    courier.start()
    assert courier.up_to_date.wait(20)
    counter.away = True
    asked = len(counter.asked)
    write_frame(mailbox)
    courier.wake()
    counter.wait_for(lambda: len(counter.asked) > asked + 6)
    assert courier.away
    counter.away = False
    counter.wait_for(lambda: len(counter.submitted) == 1 and not courier.away)

    def kinds() -> list[str]:
        return [event.kind for event in read_events(tmp_path / "events.jsonl")]

    counter.wait_for(lambda: len(kinds()) == 2)  # It is written down a moment later.
    assert kinds() == ["link-lost", "link-back"]
    counter.wait_for(lambda: len(log_lines) == 2)
    assert (
        "training goes on" in log_lines[0]
        and "back in reach" in log_lines[1]
        and len(log_lines) == 2
    )


def test_a_frame_that_a_server_set_back_has_forgotten_is_sent_again(courier, counter, mailbox):
    courier.start()
    write_frame(mailbox)
    courier.wake()
    counter.wait_for(lambda: len(counter.submitted) == 1)
    counter.fates = {}
    counter.tell()
    counter.wait_for(lambda: len(counter.submitted) >= 2)
    first, again = counter.submitted[:2]
    assert first.digest == again.digest


def test_a_closed_courier_leaves_no_thread_behind(courier, counter):
    courier.start()
    assert courier.up_to_date.wait(20)
    courier.close()
    counter.tell()  # Ends the waiting call.
    courier.wait(20)
    assert not any(thread.is_alive() for thread in courier._threads)


def test_a_fenced_courier_stops_and_says_so(courier, counter):
    courier.start()
    counter.fenced = True
    counter.tell()
    counter.wait_for(lambda: isinstance(courier.trouble, FencedError))
    assert courier.closed.is_set()


def test_heartbeats_are_counted_and_say_how_far_the_region_may_train(courier, counter, mailbox):
    counter.flags["until"] = 500.0
    courier.start()
    counter.wait_for(lambda: any(beat.until == 500.0 for beat in counter.heartbeats))
    assert mailbox.calls().until == 500.0
    numbers = [beat.n for beat in counter.heartbeats]
    assert numbers == list(range(1, len(numbers) + 1))


def test_heartbeats_say_how_fast_the_link_was_measured(courier, counter):
    courier.start()
    counter.wait_for(lambda: any(beat.link_up == 2e6 for beat in counter.heartbeats))
    assert counter.heartbeats[-1].link_down is None, "nothing was large enough to measure"


def test_room_is_only_told_in_answers_to_heartbeats(courier, counter):
    """Other news, and what was overtaken, leave it as it is, or take nothing but it."""
    courier.start()
    assert courier.up_to_date.wait(20)
    courier.close()
    counter.tell()
    courier.wait(20)
    courier.closed.clear()
    news = courier.news
    courier.take(news.model_copy(update={"n": news.n + 5, "until": 700.0}))
    courier.take(news.model_copy(update={"n": news.n + 6, "until": None, "end": True}))
    assert courier.news.until == 700.0 and courier.news.end
    late = news.model_copy(update={"n": news.n + 5, "until": 650.0})
    courier.take(late, known=news.n + 5)
    assert courier.news.until == 650.0 and courier.news.end and courier.news.n == news.n + 6


def test_a_damaged_image_is_fetched_again(courier, counter, mailbox):
    mailbox.image_file(0).write_bytes(b"nonsense")
    courier.start()
    assert courier.up_to_date.wait(20)
    assert mailbox.image_version(0) == 0


def test_heartbeats_say_what_the_trainer_says(courier, counter, mailbox):
    blank = TrainerProgress.none(2)
    fragments = tuple(FragmentProgress(version=v, steps=2.0) for v in (3, 4))
    heldout = HeldOut(versions=(3, 4), loss=2.5)
    mailbox.write_progress(
        TrainerProgress(
            step=12,
            training=True,
            ended=0,
            fragments=fragments,
            tokens=blank.tokens,
            loss=float("nan"),
            why="training",
            heldout=heldout,
        )
    )
    courier.trainer, courier.restarts = Reporting(), 2
    courier.start()
    counter.wait_for(lambda: bool(counter.heartbeats))
    beat = counter.heartbeats[0]
    assert (beat.step, beat.training, beat.why, beat.restarts) == (12, True, "training", 2)
    assert beat.fragments[0].version == 3 and beat.loss is None and beat.heldout.loss == 2.5


def test_what_an_earlier_trainer_threw_away_is_not_said_of_the_next(courier, mailbox):
    divergence = Divergence(times=20, tokens=9.0, step=1, seconds=1.0, published=False, why="NaN")
    progress = TrainerProgress.none(2).model_copy(update={"divergence": divergence})
    mailbox.write_progress(progress)
    assert courier.report().divergence is None, "the next one has not reported yet"
    courier.trainer = Reporting()
    assert courier.report().divergence == divergence


def test_the_average_is_fetched_beside_each_evaluation_by_the_region_that_evaluates(
    courier, counter, mailbox, log_lines
):
    def measured(*versions):
        heldout = HeldOut(versions=versions, loss=2.5)
        mailbox.write_progress(blank.model_copy(update={"heldout": heldout}))
        courier.wake()

    def beats(more=2):
        reached = len(counter.heartbeats) + more
        counter.wait_for(lambda: len(counter.heartbeats) >= reached)

    def asked():
        return counter.asked.count("average")

    blank = TrainerProgress.none(2)
    courier.start()
    measured(0, 0)
    counter.tell(evaluate=True)
    beats()
    counter.tell(evaluate=False, ema=True)
    beats()
    assert asked() == 0, "no run, or no region, to measure it for"
    counter.tell(evaluate=True)
    courier.wake()
    counter.wait_for(mailbox.average_file.exists)
    mailbox.average_file.unlink()
    courier.wake()
    beats()
    assert asked() == 1
    counter.no_average = "This run keeps none."
    measured(1, 0)
    counter.wait_for(lambda: asked() == 2)
    counter.wait_for(lambda: any("is not measured: This run" in line for line in log_lines))
    beats()
    assert courier.trouble is None and not courier.closed.is_set()


def test_a_download_of_the_average_leaves_the_line_to_the_versions_for_a_while(tmp_path):
    blank = TrainerProgress.none(2)
    report = blank.model_copy(update={"heldout": HeldOut(versions=(3, 4), loss=2.5)})
    news = Counter().news() | {"evaluate": True, "ema": True}
    fetch = AverageFetch(Mailbox(tmp_path))
    fetch._rest_until = 100.0
    assert not fetch.is_due(News.model_validate(news), report, now=99.0)
    assert fetch.is_due(News.model_validate(news), report, now=101.0)
    over = News.model_validate(news | {"finished": True})
    assert fetch.is_due(over, report, now=99.0), "the last one matters"
    assert not fetch.is_due(over, None, now=101.0) and not fetch.is_due(over, blank, now=101.0)


def test_reports_become_lines_on_disk_with_what_was_moved(courier, counter, mailbox):
    blank = TrainerProgress.none(2)
    trained = blank.tokens.model_copy(update={"trained": (64.0, 60.0)})
    report = {"step": 12, "training": True, "worked": 9.0, "blocked": 1.0, "tokens": trained}
    report |= {"learning_rate": 0.003, "gradient_norm": 1.5, "loss": 2.5}
    mailbox.write_progress(blank.model_copy(update=report))
    courier.start()
    assert courier.up_to_date.wait(20)
    counter.wait_for(lambda: bool(counter.heartbeats))
    assert read_metrics(mailbox.folder)["step"] == [], "an earlier trainer's report says nothing"
    courier.trainer = Reporting()
    courier.wake()
    counter.wait_for(lambda: bool(read_metrics(mailbox.folder)["step"]))
    found = {name: column[0] for name, column in read_metrics(mailbox.folder).items()}
    assert (found["step"], found["trained"], found["loss"]) == (12, 64.0, 2.5)
    assert (found["learning_rate"], found["gradient_norm"]) == (0.003, 1.5)
    assert (found["blocked"], found["staleness"]) == (0.1, 1)
    assert found["bytes_down"] == 2 * 4 * SIZE, "two fragments came whole"


def lanes(grant=1, position=0, **more):
    found = {3: (grant, position), 4: (grant, position)}
    return {"order": "a" * 32, "count": 8, "lanes": found, **more}


def test_what_the_trainer_reads_is_kept_when_it_changes_hands_not_when_it_moves_on(
    courier_of, counter, mailbox
):
    counter.flags["lanes"] = lanes(position=4)
    courier = courier_of()
    courier.start()
    assert mailbox.lanes().lanes == {3: (1, 4), 4: (1, 4)}, "before anything else is heard"
    written = mailbox.lanes_file.stat().st_ino
    counter.tell(lanes=lanes(position=9))
    counter.wait_for(lambda: courier.news.lanes.lanes[3] == (1, 9))
    assert mailbox.lanes_file.stat().st_ino == written
    counter.tell(lanes=lanes(position=9, asked=[4]))
    counter.wait_for(lambda: mailbox.lanes().asked == (4,))
    counter.tell(lanes=lanes(grant=2, position=30))
    counter.wait_for(lambda: mailbox.lanes().lanes[3] == (2, 30))
    counter.tell(lanes=None)
    counter.wait_for(lambda: courier.news.lanes is None)
    assert mailbox.lanes().lanes[3] == (2, 30)


def test_a_dead_trainer_is_quoted_about_the_text_that_was_joined_with_and_no_other(
    courier_of, counter, mailbox
):
    text = {"digest": "a" * 32, "settings": "b" * 32, "tokens": 900, "windows": 90}
    order = {**text, "sequence": 10, "lanes": 8}
    reading = {"order": order, "count": 8, "lanes": {3: (1, 5)}, "released": {4: (1, 2)}}
    progress = TrainerProgress.none(2).model_dump()
    mailbox.write_progress(TrainerProgress.model_validate({**progress, "reading": reading}))
    counter.flags["lanes"] = lanes()
    courier = courier_of()
    assert courier.report().reading.released == {4: (1, 2)}
    courier.news = courier.news.model_copy(
        update={"lanes": courier.news.lanes.model_copy(update={"order": "c" * 32})}
    )
    assert courier.report().reading is None
    courier.trainer = Reporting()
    assert courier.report().reading is not None
