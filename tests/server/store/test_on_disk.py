"""A file is whole or not there; a full disk is told apart; whatever is damaged is named."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco_cli.errors import StoreError
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.store.journal import FileJournal
from diloco_cli.server.store.run_store import RunStore, open_store
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.system import files as disk
from diloco_cli.system.files import DiskFull, keep_bytes

DIGEST = "a" * 64


def opened(folder: Path, **options) -> RunStore:
    return open_store({"kind": "folder", **options}, folder / "server", layout="lay", spec="spec")[
        0
    ]


@pytest.fixture
def store(tmp_path: Path):
    store = opened(tmp_path)
    yield store
    store.close()


def state(size: int = 100, value: float = 1.0) -> StoredState:
    return StoredState(*(np.full(size, value + i, np.float32) for i in range(3)))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_folder_has_the_documented_form(tmp_path, store):
    store.keep_payload(DIGEST, b"codes")
    store.publish(3, 42, state(), b"frame")
    assert files(tmp_path / "server") == [
        "fragments/3/v00000042.delta",
        "fragments/3/v00000042.state",
        "journal",
        "lock",
        f"payloads/{DIGEST}.frame",
        "run.json",
    ]
    about = json.loads((tmp_path / "server/run.json").read_text())
    assert about == {"store": 1, "run": store.run, "layout_digest": "lay", "spec_digest": "spec"}


def test_only_the_owner_may_look(tmp_path, store):
    store.keep_payload(DIGEST, b"codes")
    store.draft_payload().write(b"x")
    store.publish(0, 1, state(), b"frame")
    for path in (tmp_path / "server", *(tmp_path / "server").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_refused_server_is_told_who_holds_the_folder(tmp_path, store):
    with pytest.raises(StoreError, match=rf"process {os.getpid()}\)"):
        opened(tmp_path)


def test_a_killed_server_does_not_leave_the_folder_locked(tmp_path):
    code = (
        "import sys; from pathlib import Path; from diloco_cli.server.store import stores\n"
        "stores.build({'kind': 'folder'}).open(Path(sys.argv[1]), layout='lay', spec='spec')\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "server")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout and holder.stdin and holder.stdout.readline() == b"open\n"
    with pytest.raises(StoreError, match=f"process {holder.pid}"):
        opened(tmp_path)
    holder.kill()
    holder.communicate()
    opened(tmp_path).close()


def test_drafts_of_a_crash_are_removed_at_the_next_start(tmp_path):
    first = opened(tmp_path)
    first.publish(0, 1, state(), b"frame")
    first.close()
    left = [
        "payloads/upload.0.draft",
        "fragments/0/.v00000002.state.7.draft",
    ]
    for name in left:
        (tmp_path / "server" / name).write_bytes(b"half")
    opened(tmp_path).close()
    assert files(tmp_path / "server" / "payloads") == []
    assert files(tmp_path / "server" / "fragments") == ["0/v00000001.delta", "0/v00000001.state"]


def test_names_that_a_killed_server_did_not_flush_are_flushed_at_the_next_start(
    tmp_path, monkeypatch
):
    """Seen before it is durable, a folder would be relied on, and gone with the power."""
    folder = tmp_path / "server"
    (folder / "fragments" / "0").mkdir(parents=True)
    (folder / "payloads").mkdir()
    FileJournal.create(folder / "journal", run="r").close()
    flushed, real = set(), os.fsync

    def fsync(handle: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    opened(tmp_path).close()
    below = {str(path) for path in folder.rglob("*") if path.is_dir()}
    assert {str(tmp_path), str(folder), *below} <= flushed


def test_a_flipped_byte_anywhere_in_a_state_is_refused_by_the_name_of_its_file(tmp_path, store):
    store.publish(0, 1, state(size=3), None)
    path = tmp_path / "server/fragments/0/v00000001.state"
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x01
        path.write_bytes(damaged)
        with pytest.raises(StoreError) as refusal:
            store.load_state(0, 1)
        assert str(path) in str(refusal.value)


def test_a_state_cut_short_is_refused(tmp_path, store):
    store.publish(0, 1, state(), None)
    path = tmp_path / "server/fragments/0/v00000001.state"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="cannot be read"):
        store.load_state(0, 1)


def test_a_state_under_another_name_is_refused(tmp_path, store):
    store.publish(0, 1, state(), None)
    folder = tmp_path / "server/fragments/0"
    (folder / "v00000001.state").rename(folder / "v00000002.state")
    with pytest.raises(StoreError, match="is damaged"):
        store.load_state(0, 2)


@pytest.mark.parametrize("lost", ["journal", "run.json"])
def test_a_run_that_lost_its_journal_or_its_name_is_refused(tmp_path, lost):
    store = opened(tmp_path)
    store.journal.append({"kind": "called"})
    store.close()
    (tmp_path / "server" / lost).unlink()
    with pytest.raises(StoreError, match=f"{lost} is missing"):
        opened(tmp_path)


def test_a_first_start_that_crashed_after_the_journal_goes_on(tmp_path):
    store = opened(tmp_path)
    run = store.run
    store.close()
    (tmp_path / "server/run.json").unlink()
    again = opened(tmp_path)
    assert again.run == run
    again.close()


@pytest.mark.parametrize(
    "change, why",
    [
        ({"store": 2}, "store version 2, this version of diloco reads 1"),
        ({"run": "other"}, "is of run other, the journal of"),
        ({"store": "x"}, "cannot be read"),
    ],
)
def test_a_run_file_that_does_not_fit_is_refused(tmp_path, change, why):
    opened(tmp_path).close()
    path = tmp_path / "server/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreError, match=why):
        opened(tmp_path)


def test_uploads_are_turned_away_before_the_disk_is_full(tmp_path):
    disk = os.statvfs(tmp_path)
    store = opened(tmp_path, reserve=disk.f_bavail * disk.f_frsize * 2)
    with pytest.raises(DiskFull, match=r"needs [\d,]+ free bytes and has [\d,]+"):
        store.draft_payload()
    store.keep_payload(DIGEST, b"the reserve is there to be used by what was accepted")
    store.close()


def refusing(number: int, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, refuse)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_disk_full_at_any_step_shows_nothing_and_leaves_nothing(
    tmp_path, store, monkeypatch, call
):
    before = files(tmp_path)
    draft = store.draft_payload()
    draft.write(b"codes")
    refusing(errno.ENOSPC, monkeypatch, call)
    for attempt in (
        lambda: store.keep_payload(DIGEST, b"codes"),
        lambda: store.publish(0, 1, state(), b"frame"),
        lambda: draft.write(b"more") if call == "write" else store.keep_payload(DIGEST, draft),
    ):
        with pytest.raises(DiskFull, match="no room left"):
            attempt()
    draft.discard()
    monkeypatch.undo()
    assert files(tmp_path) == before


def test_a_failing_disk_is_not_called_full(store, monkeypatch):
    refusing(errno.EIO, monkeypatch, "fsync")
    with pytest.raises(StoreError, match="Input/output error") as refusal:
        store.keep_payload(DIGEST, b"codes")
    assert not isinstance(refusal.value, DiskFull)


def test_a_file_is_flushed_before_it_is_named_and_its_folder_after(tmp_path, monkeypatch):
    done: list[str] = []

    def noting(name: str) -> None:
        real = getattr(os, name)

        def call(first, *rest):
            where = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            done.append(f"{name} {Path(where).suffix or 'folder'}")
            return real(first, *rest)

        monkeypatch.setattr(os, name, call)

    for name in ("write", "fsync", "replace"):
        noting(name)
    keep_bytes(tmp_path / "file.frame", b"codes")
    assert done == ["write .draft", "fsync .draft", "replace .draft", "fsync folder"]

    store = opened(tmp_path)
    done.clear()
    draft = store.draft_payload()
    draft.write(b"codes")
    store.keep_payload(DIGEST, draft)
    assert done == ["write .draft", "fsync .draft", "replace .draft", "fsync folder"]
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path):
    """A disk of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root and the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_really_full_disk_is_told_and_everything_works_once_there_is_room(small_disk):
    store = opened(small_disk, reserve=0)
    ballast = small_disk / "ballast"
    big = state(size=60_000)  # 720 kB
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    store.journal.append({"kind": "x" * 9000})
    for attempt in (
        lambda: store.publish(0, 1, big, b"frame"),
        lambda: store.keep_payload(DIGEST, bytes(9000)),
        lambda: store.draft_payload(9000),
        store.journal.sync,
    ):
        with pytest.raises(DiskFull):
            attempt()
    assert files(small_disk / "server/payloads") == files(small_disk / "server/fragments") == []
    ballast.unlink()
    store.publish(0, 1, big, b"frame")
    store.keep_payload(DIGEST, bytes(9000))
    store.draft_payload(9000).discard()
    store.journal.sync()
    assert store.load_state(0, 1).digest == big.digest
    store.close()


def test_a_state_cut_off_by_a_full_disk_is_never_visible(small_disk):
    store = opened(small_disk, reserve=0)
    with pytest.raises(DiskFull, match="no room left"):
        store.publish(0, 1, state(size=200_000), b"frame")
    assert files(small_disk / "server/fragments") == []
    store.close()


def test_a_draft_that_was_kept_or_could_not_be_is_closed(store, monkeypatch):
    def handles() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = handles()
    store.keep_payload(DIGEST, store.draft_payload())
    draft = store.draft_payload()
    refusing(errno.EIO, monkeypatch, "fsync")
    with pytest.raises(StoreError):
        store.keep_payload(DIGEST, draft)
    assert handles() == before and not draft.path.exists()


def test_drafts_never_share_a_name(tmp_path):
    assert len({disk.draft_of(tmp_path / "file") for _ in range(100)}) == 100


def test_a_body_in_very_many_pieces_is_written_like_any_other(tmp_path):
    draft = Draft(tmp_path / "draft")
    draft.write_pieces([b"ab"] * 3000)
    draft.write_pieces([b"cd"] * 10)
    assert draft.size == 6020 and draft.read_at(5998, 4) == b"abcd"
    draft.discard()
