"""A worker is let in under its own name, once, and only to the run that it belongs to."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from diloco_cli.errors import LinkError, SpecError, StoreError
from diloco_cli.net.client import Held, OlderCopy
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.digest import vector_digest
from diloco_cli.worker.agent.join import RegionJoin, SharedSettings, order_of
from diloco_cli.worker.agent.published_weights import bring_up
from diloco_cli.worker.mailbox import FolderOwner, Image, Mailbox
from tests.worker.fake_server import LAYOUT, SHARED, SIZE
from tests.worker.trainer.harness import tiny_spec


@pytest.fixture
def mailbox(tmp_path):
    made = Mailbox(tmp_path / "regions" / "paris")
    made.prepare()
    return made


@pytest.fixture
def door(mailbox, log_lines):
    return RegionJoin(mailbox, "paris", SHARED, Wakeup())


def test_a_start_is_counted_before_the_server_hears_of_it(door, mailbox, counter):
    seen = []
    counter.join = lambda owner, boot: seen.append((mailbox.identity(), owner, boot)) or 1
    door.boot()
    door.boot()
    joined = door.join(counter.connect(), "run-1", wait=1)
    (before, owner, boot), after = seen[0], mailbox.identity()
    key = after.key
    known = FolderOwner(owner, 2, key=key, region="paris")
    assert before == known and boot == 2 and joined.epoch == 1
    assert key and after == replace(known, run="run-1", high=5)


def test_the_folder_of_another_region_speaks_for_this_one_without_what_it_posted(
    door, mailbox, log_lines
):
    mailbox.write_identity(FolderOwner("oslo's", 7, "run-1", high=40, key="k", region="oslo"))
    mailbox.post(0, b"a frame of oslo")
    door.boot()
    identity = mailbox.identity()
    assert identity.owner != "oslo's" and identity.key != "k"
    assert identity == FolderOwner(identity.owner, 1, "run-1", key=identity.key, region="paris")
    assert not mailbox.outbox_file(0).exists()
    assert "was the folder of oslo" in log_lines[0]
    door.boot()
    assert mailbox.identity() == replace(identity, boot=2), "once"


def test_a_region_that_another_worker_holds_is_waited_for(door, counter, log_lines):
    tries = []

    def join(owner, boot):
        tries.append(owner)
        if len(tries) < 3:
            raise Held("another worker holds this region", hint=None, retry_seconds=0.01)
        return 2

    counter.join = join
    door.boot()
    assert door.join(counter.connect(), "run-1", wait=0).epoch == 2
    assert log_lines == ["waiting to take over: another worker holds this region"]


def test_an_older_copy_of_a_folder_takes_a_new_name(door, counter, mailbox):
    def join(owner, boot):
        if owner == "old":
            raise OlderCopy("start 4, but start 9 was seen before")
        return 3

    counter.join = join
    mailbox.write_identity(FolderOwner("old", 3, "run-1"))
    door.boot()
    assert door.join(counter.connect(), "run-1", wait=0).epoch == 3
    assert mailbox.identity().owner != "old" and mailbox.identity().boot == 1


def test_a_server_that_is_not_there_is_waited_for_but_not_for_ever(door, counter, log_lines):
    counter.away = True
    with pytest.raises(LinkError, match="nobody answers") as late:
        door.ask(counter.connect().run, wait=0.05)
    # It may be that the run is over, and its server gone with it.
    assert "A run that is finished is served no longer" in (late.value.hint or "")
    assert log_lines == ["waiting for the server: nobody answers"]


def test_a_worker_told_to_leave_stops_waiting(door, counter):
    counter.away = True
    threading.Timer(0.05, door.wakeup.stop, ["a test"]).start()
    assert door.ask(counter.connect().run, wait=60) is None


def test_settings_that_differ_are_named_with_both_values(door, counter):
    other = {"sync": {"every": 24, "quorum": 1}, "seed": 0}
    door.shared = SharedSettings(other, "3" * 64, LAYOUT)
    with pytest.raises(SpecError, match=r"sync\.every: 8 there, 24 here") as caught:
        door.check(counter.connect().run())
    assert "quorum" not in caught.value.message
    assert "diloco amend" in (caught.value.hint or "")
    # Under earlier terms the run had just these settings.
    door.shared = SharedSettings(other, "4" * 64, LAYOUT)
    door.check(counter.connect().run())


def test_a_folder_of_another_run_is_refused(door, counter, mailbox):
    mailbox.write_identity(FolderOwner("me", 1, "run-0"))
    door.boot()
    with pytest.raises(SpecError, match="belongs to run run-0, the server runs run-1"):
        door.check(counter.connect().run())


def test_a_folder_of_a_run_that_trained_nothing_begins_anew(door, counter, mailbox, log_lines):
    counter.was = ("run-a", "run-0")
    mailbox.write_identity(FolderOwner("me", 4, "run-0", high=9))
    mailbox.write_image(0, Image(0, {}, "", np.zeros(SIZE, np.float32)))
    mailbox.post(0, b"a frame of the old run")
    for file in (mailbox.checkpoint, mailbox.progress_file):
        file.write_bytes(b"of the old run")
    door.boot()
    about = counter.connect().run()
    assert door.is_replaced(about)
    door.begin_anew(about)
    door.check(about)
    assert mailbox.identity().run == "" and mailbox.identity().owner != "me"
    left = {path.name for path in mailbox.folder.rglob("*") if path.is_file()}
    assert left == {"identity.json", "trainer.lock"}
    assert log_lines == ["run run-0 trained nothing; beginning anew in run run-1"]


def test_beginning_anew_that_was_interrupted_is_repeated(door, counter, mailbox, monkeypatch):
    counter.was = ("run-0",)
    mailbox.write_identity(FolderOwner("me", 4, "run-0"))
    mailbox.checkpoint.write_bytes(b"of the old run")
    door.boot()

    def dying(identity):
        raise KeyboardInterrupt

    monkeypatch.setattr(mailbox, "write_identity", dying)
    with pytest.raises(KeyboardInterrupt):
        door.begin_anew(counter.connect().run())
    again = RegionJoin(Mailbox(mailbox.folder), "paris", SHARED, Wakeup())
    again.boot()
    assert again.is_replaced(counter.connect().run())


def test_a_folder_of_a_run_that_is_continued_goes_over_with_all_but_reports_and_news(
    door, counter, mailbox
):
    mailbox.write_identity(FolderOwner("me", 4, "run-0", high=9))
    mailbox.write_image(0, Image(6, {}, "", np.zeros(SIZE, np.float32), "run-0"))
    mailbox.post(0, b"a frame of the old run")
    for file in (mailbox.checkpoint, mailbox.progress_file, mailbox.calls_file):
        file.write_bytes(b"of the old run")
    door.boot()
    about = counter.connect().run().model_copy(update={"continues": ("run-a", "run-0")})
    assert door.is_continued(about) and not door.is_replaced(about)
    door.go_over(about)
    owner = mailbox.identity()
    assert (owner.run, owner.was, owner.boot, owner.high) == ("run-1", ("run-0",), 1, -1)
    assert owner.owner != "me" and not door.is_continued(about)
    assert mailbox.checkpoint.exists() and mailbox.outbox_file(0).exists()
    # The server's own check holds the versions of a report against its newest.
    assert not mailbox.progress_file.exists() and not mailbox.calls_file.exists()
    door.join(counter.connect(), "run-1", wait=0)  # Weights of the old run are no hindrance.


def test_a_server_older_than_our_images_is_refused(door, counter, mailbox):
    mailbox.write_image(0, Image(4, {}, "", np.zeros(SIZE, np.float32)))
    door.boot()
    with pytest.raises(StoreError, match=r"holds version 4 of fragment 0, but .* newest is 0"):
        door.join(counter.connect(), "run-1", wait=0)


def test_a_server_that_went_on_from_an_older_copy_is_refused_at_the_same_number(
    door, counter, mailbox
):
    counter.publish(0)
    other = np.full(SIZE, 7, np.float32)
    mailbox.write_image(0, Image(1, {}, vector_digest(other), other))
    door.boot()
    with pytest.raises(StoreError, match="Version 1 of fragment 0 that this region holds") as no:
        door.join(counter.connect(), "run-1", wait=0)
    assert no.value.exit_code == 5 and "older copy" in no.value.message
    ours = counter.weights[0][-1]
    mailbox.write_image(0, Image(1, {}, vector_digest(ours), ours))
    assert door.join(counter.connect(), "run-1", wait=0).versions == (1, 0)


def test_weights_that_the_servers_deltas_do_not_continue_are_another_history(counter):
    other = np.full(SIZE, 7, np.float32)
    held = Image(0, {}, vector_digest(other), other)
    counter.publish(0)
    with pytest.raises(StoreError, match="Version 0 of fragment 0") as no:
        bring_up(counter.connect(), 0, held, 1)
    assert no.value.exit_code == 5
    # Weights of ours that are damaged prove nothing; they are fetched whole.
    spoiled = Image(0, {}, "f" * 32, other)
    image, why = bring_up(counter.connect(), 0, spoiled, 1)
    assert image.version == 1 and "do not add up" in why


def test_a_region_names_the_text_it_reads_unless_it_cannot_be_read(tmp_path, log_lines):
    spec = tiny_spec(tmp_path)
    named = order_of(spec, "paris")
    assert named and named.lanes == 64 and named.tokens > 100_000
    (tmp_path / "text.txt").unlink()
    assert order_of(spec, "paris") is None
    assert "no file matches" in log_lines[-1]
