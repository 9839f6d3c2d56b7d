"""The mailbox: whole files or none, whoever dies; one worker at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco_cli.errors import SpecError, StoreError
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Header, pack
from diloco_cli.wire.messages import News, TrainerProgress
from diloco_cli.worker.mailbox import Fate, FolderOwner, Image, Mailbox, stamp

WEIGHTS = np.arange(1000, dtype=np.float32)


@pytest.fixture
def mailbox(tmp_path):
    made = Mailbox(tmp_path / "regions" / "paris")
    made.prepare()
    return made


def a_frame(clock=7, size=1000):
    header = Header.contribution(
        run="run-1",
        layout="0" * 64,
        fragment=3,
        size=size,
        codec={"kind": "fp32"},
        base=2,
        region="paris",
        clock=clock,
    )
    return pack(header, np.full(size, clock, np.float32))


def some_news(**changes):
    quiet = {"end": False, "finished": False, "stop": False, "evaluate": False}
    said = {"n": 4, "versions": [1, 2], "calls": {1: 2}, "fates": {}, "lease_seconds": 10.0}
    return News.model_validate({**said, **quiet, **changes})


def progress_at(step: int) -> TrainerProgress:
    return TrainerProgress.none(2).model_copy(update={"step": step})


def test_what_is_put_in_comes_out(mailbox):
    mailbox.write_identity(FolderOwner("me", 3, "run-1", 17))
    mailbox.write_fate(1, Fate("d" * 64, "returned", "too old"))
    mailbox.write_calls(some_news())
    mailbox.write_progress(progress_at(5))
    mailbox.post(3, a_frame())
    mailbox.write_image(0, Image(9, {"paris": "e" * 64}, vector_digest(WEIGHTS), WEIGHTS))

    assert mailbox.identity() == FolderOwner("me", 3, "run-1", 17)
    assert mailbox.fate(1) == Fate("d" * 64, "returned", "too old")
    assert mailbox.calls() == some_news()
    assert mailbox.progress() == progress_at(5)
    frame = mailbox.frame(3)
    assert frame is not None and (frame.header.clock, frame.values()[0]) == (7, 7.0)
    image = mailbox.image(0)
    assert image is not None and (image.version, image.merged) == (9, {"paris": "e" * 64})
    np.testing.assert_array_equal(image.weights, WEIGHTS)
    assert mailbox.image_version(0) == 9


def test_an_empty_mailbox_is_no_mistake(mailbox):
    found = (mailbox.identity(), mailbox.frame(0), mailbox.image(0), mailbox.fate(0))
    assert found == (None, None, None, None)
    assert mailbox.calls() is None and mailbox.progress() is None
    assert mailbox.image_version(0) == -1 and stamp(mailbox.outbox_file(0)) is None


def test_every_replacement_can_be_seen_without_reading(mailbox):
    mailbox.write_progress(progress_at(1))
    before = stamp(mailbox.progress_file)
    mailbox.write_progress(progress_at(2))
    assert stamp(mailbox.progress_file) != before


def test_files_that_may_be_lost_may_also_be_empty(mailbox):
    mailbox.calls_file.write_bytes(b"")
    mailbox.fate_file(0).write_bytes(b'{"digest"')
    assert mailbox.calls() is None and mailbox.fate(0) is None


def test_a_damaged_image_counts_as_none_but_is_never_read(mailbox):
    mailbox.image_file(0).write_bytes(b"not safetensors")
    assert mailbox.image_version(0) == -1
    with pytest.raises(StoreError, match="cannot be read"):
        mailbox.image(0)


@pytest.mark.parametrize("damage", ["{", '{"who": 1}'])
def test_a_damaged_identity_is_named(mailbox, damage):
    (mailbox.folder / "identity.json").write_text(damage)
    with pytest.raises(StoreError, match=r"identity\.json is damaged"):
        mailbox.identity()


def test_a_post_is_durable_before_it_is_visible(mailbox, monkeypatch):
    order = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), real_sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *p: (order.append("rename"), real_replace(*p))[1])
    mailbox.post(0, a_frame())
    assert order == ["fsync", "rename", "fsync"]

    order.clear()
    mailbox.write_progress(progress_at(1))
    assert order == ["rename"], "what may be lost does not wait for the disk"


def test_a_second_worker_on_the_folder_is_told_who_holds_it(mailbox):
    with mailbox.locked(), pytest.raises(SpecError, match=f"pid {os.getpid()}"):  # noqa: SIM117
        with Mailbox(mailbox.folder).locked():
            pass


def test_the_folder_is_free_again_after_its_worker(mailbox):
    with mailbox.locked():
        pass
    with mailbox.locked():
        pass


WRITER = """
import sys
from pathlib import Path
import numpy as np
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.messages import TrainerProgress
from diloco_cli.worker.mailbox import Image, Mailbox
mailbox = Mailbox(Path(sys.argv[1]))
frames = [bytes.fromhex(line) for line in sys.stdin]
number, progress = 0, TrainerProgress.none(500)
while True:
    number += 1
    mailbox.post(0, frames[number % 2])
    weights = np.full(50_000, number, np.float32)
    mailbox.write_image(0, Image(number, {}, vector_digest(weights), weights))
    mailbox.write_progress(progress.model_copy(update={"step": number}))
    print(number, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_whole_files(mailbox):
    frames = [a_frame(clock, 50_000) for clock in (1, 2)]
    for life in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(mailbox.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdin and writer.stdout
        writer.stdin.write("".join(f"{frame.hex()}\n" for frame in frames))
        writer.stdin.close()
        for _ in range(3 + life):  # Each life ends at another point of the cycle.
            assert writer.stdout.readline()
            look_at_everything(mailbox)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        look_at_everything(mailbox)
    mailbox.clear_agent_drafts()
    mailbox.clear_trainer_drafts()
    assert not [path for path in Path(mailbox.folder).rglob("*") if "draft" in path.name]


def look_at_everything(mailbox):
    frame, image, progress = mailbox.frame(0), mailbox.image(0), mailbox.progress()
    assert frame is not None and frame.values()[0] == frame.header.clock
    assert image is not None and vector_digest(image.weights) == image.published
    assert progress is not None and len(progress.fragments) == 500


def test_half_a_checkpoint_of_a_killed_trainer_does_not_stay_for_ever(mailbox):
    # safetensors writes into a file of its own naming and renames it to our draft.
    left = [mailbox.folder / name for name in (".tmpA1b2C3", "checkpoint.draft")]
    for path in left:
        path.write_bytes(b"half")
    mailbox.checkpoint.write_bytes(b"whole")
    mailbox.clear_agent_drafts()
    assert all(path.exists() for path in left)  # Its writer may still be alive.
    mailbox.clear_trainer_drafts()
    assert not any(path.exists() for path in left) and mailbox.checkpoint.exists()


def test_a_folder_that_cannot_be_written_is_a_sentence_and_exit_code_5(mailbox):
    (mailbox.folder / "lock").mkdir()
    with pytest.raises(StoreError, match="lock cannot be written: Is a directory") as found:
        mailbox.locked().__enter__()
    assert found.value.exit_code == 5 and "--dir" in str(found.value.hint)
