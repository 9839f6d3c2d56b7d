"""What was synced is there for ever; a torn tail is cut; damage is refused, never skipped."""

import errno
import hashlib
import os
import subprocess
import threading
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from diloco_cli.errors import StoreError
from diloco_cli.server.store import journal as journal_module
from diloco_cli.server.store import journal_format
from diloco_cli.server.store.journal import FileJournal, read_journal
from diloco_cli.server.store.journal_format import MAGIC
from diloco_cli.system.files import DiskFull


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def written(path: Path, *batches: list[str]) -> list[int]:
    """Writes one record for each word, a sync after each batch; gives the offset of each record."""
    journal = FileJournal.create(path, run="r")
    offsets = []
    for batch in batches:
        places = len(path.read_bytes())
        for word in batch:
            journal.append({"kind": word})
        journal.sync()
        data = path.read_bytes()
        for _ in batch:
            offsets.append(places)
            places = data.find(MAGIC, places + 1)
    journal.close()
    return offsets


def opened(path: Path) -> tuple[list[str], list[str]]:
    """The words in a journal, and what was logged while it was opened."""
    lines = BufferingHandler(1000)
    journal_module.log.addHandler(lines)
    try:
        journal, records = FileJournal.open(path)
    finally:
        journal_module.log.removeHandler(lines)
    journal.close()
    return [record["kind"] for record in records], [line.getMessage() for line in lines.buffer]


def flipped(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def test_records_come_back_in_order_and_are_numbered_from_one(path):
    journal = FileJournal.create(path, run="r7")
    assert [journal.append({"kind": kind}) for kind in ("called", "closed")] == [1, 2]
    journal.close()
    again, records = FileJournal.open(path)
    assert records == [{"kind": "called"}, {"kind": "closed"}]
    assert (again.run, again.last, again.append({"kind": "end"})) == ("r7", 2, 3)
    again.close()
    assert opened(path) == (["called", "closed", "end"], [])


def test_the_bytes_of_schema_1_never_change(path):
    written(path, ["called", "größer"], ["closed"])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == (
        "077263becb861cf7d50812fda3991efaa0f2f8a11f868ed0eae01b6eac730c92"
    )


def test_the_file_is_for_its_owner_only(path):
    written(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_tail_torn_at_any_byte_is_cut_and_logged(path):
    *_, start = written(path, ["one"], ["two"], ["three"])
    whole = path.read_bytes()
    for length in range(start, len(whole)):
        path.write_bytes(whole[:length])
        words, logged = opened(path)
        assert words == ["one", "two"]
        assert len(logged) == (length > start)
        assert path.stat().st_size == start
        if logged:
            assert f"cut {length - start} bytes after record 2, at byte {start}" in logged[0]


def test_after_a_cut_the_journal_goes_on(path):
    written(path, ["one"], ["two"])
    path.write_bytes(path.read_bytes()[:-3])
    journal, _ = FileJournal.open(path)
    assert journal.append({"kind": "second try"}) == 2
    journal.close()
    assert opened(path) == (["one", "second try"], [])


def test_a_flipped_byte_anywhere_is_refused_or_in_the_last_record_cut(path):
    _, second, last = written(path, ["one"], ["two"], ["three"])
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole)
        flipped(path, position)
        if position >= last:
            assert opened(path)[0] == ["one", "two"]
            continue
        with pytest.raises(StoreError) as refusal:
            opened(path)
        if position >= second:
            assert f"record 2 at byte {second} is damaged" in str(refusal.value)
        assert len(path.read_bytes()) == len(whole), "a refused journal is left as it is"


def test_doing_what_the_refusal_proposes_repairs_the_journal(path):
    _, second, _ = written(path, ["one"], ["two"], ["three"])
    flipped(path, second + 5)
    with pytest.raises(StoreError) as refusal:
        opened(path)
    hint = refusal.value.hint or ""
    subprocess.run(hint[hint.index("truncate") :].split(), check=True)
    assert opened(path) == (["one"], [])


def test_a_batch_that_was_never_flushed_is_cut_whole_even_if_its_end_survived(path):
    # After a power cut the pages of one batch may be there or not in any combination.
    _, second, third = written(path, ["one"], ["two", "three"])
    data = path.read_bytes()
    path.write_bytes(data[:second] + bytes(third - second) + data[third:])
    words, logged = opened(path)
    assert words == ["one"] and len(logged) == 1


def test_the_same_hole_is_damage_once_a_later_batch_shows_that_it_was_flushed(path):
    _, second, third, _ = written(path, ["one"], ["two", "three"], ["four"])
    data = path.read_bytes()
    path.write_bytes(data[:second] + bytes(third - second) + data[third:])
    with pytest.raises(StoreError, match=f"record 2 at byte {second} is damaged, and record 4"):
        opened(path)


def test_zeros_at_the_end_are_a_torn_tail(path):
    written(path, ["one"])
    with path.open("ab") as file:
        file.write(bytes(5000))
    assert opened(path)[0] == ["one"]


@pytest.mark.parametrize(
    "order", [[0, 2], [1, 0, 2], [0, 0, 1, 2], [0, 1, 1]], ids=["left out", "moved", "twice", "end"]
)
def test_whole_records_in_another_order_are_refused(path, order):
    starts = written(path, ["one"], ["two"], ["three"])
    data = path.read_bytes()
    ends = [*starts[1:], len(data)]
    path.write_bytes(data[: starts[0]] + b"".join(data[starts[i] : ends[i]] for i in order))
    with pytest.raises(StoreError, match="does not continue record"):
        opened(path)


def test_a_record_of_another_journal_is_refused_although_its_number_fits(path, tmp_path):
    starts = written(path, ["one"], ["two"])
    other = tmp_path / "other"
    written(other, ["uno"], ["dos"])
    path.write_bytes(path.read_bytes()[: starts[1]] + other.read_bytes()[starts[1] :])
    with pytest.raises(StoreError, match=r"record 2 .* does not continue record 1"):
        opened(path)


def test_a_newer_schema_is_refused_with_both_numbers(path):
    newer = journal_format.entry(0, b"", {"journal": 2, "run": "r"})
    path.write_bytes(journal_format.frame(newer, settled=0))
    with pytest.raises(StoreError, match="has schema 2, this version of diloco reads 1"):
        opened(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 500])
def test_what_is_no_journal_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is not a journal"):
        opened(path)


def test_a_missing_journal_is_refused(path):
    with pytest.raises(StoreError, match="is missing"):
        opened(path)


def test_an_existing_journal_is_never_created_anew(path):
    written(path, ["one"])
    with pytest.raises(StoreError, match="exists already"):
        FileJournal.create(path, run="r")
    assert opened(path)[0] == ["one"]


@pytest.mark.parametrize("record", [{"loss": float("nan")}, {"members": {1, 2}}])
def test_what_is_not_json_is_refused_and_leaves_no_trace(path, record):
    journal = FileJournal.create(path, run="r")
    with pytest.raises((ValueError, TypeError)):
        journal.append(record)
    assert journal.append({"kind": "one"}) == 1
    journal.close()
    assert opened(path)[0] == ["one"]


def test_a_record_too_long_to_read_back_is_refused(path, monkeypatch):
    monkeypatch.setattr("diloco_cli.server.store.journal_format.LONGEST", 50)
    journal = FileJournal.create(path, run="r")
    with pytest.raises(ValueError, match="at most 50"):
        journal.append({"kind": "x" * 50})
    journal.close()


class Disk:
    """Stands before fdatasync: counts, and can be made to wait or to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushes, self.error = 0, 0
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        real = os.fdatasync

        def fdatasync(handle: int) -> None:
            self.flushes += 1
            self.reached.set()
            assert self.go_on.wait(30)
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            real(handle)

        monkeypatch.setattr(os, "fdatasync", fdatasync)


def test_what_is_appended_during_a_flush_is_durable_with_the_next(path, monkeypatch):
    journal, disk = FileJournal.create(path, run="r"), Disk(monkeypatch)
    disk.go_on.clear()
    journal.append({"kind": "0"})
    first = threading.Thread(target=journal.sync)
    first.start()
    assert disk.reached.wait(30)
    for number in range(1, 20):
        journal.append({"kind": str(number)})
    disk.go_on.set()
    first.join(30)
    assert len(read_journal(path).records) == 1
    journal.sync()
    assert disk.flushes == 2
    assert len(read_journal(path).records) == 20
    journal.close()


def test_what_is_durable_needs_no_second_flush(path, monkeypatch):
    journal, disk = FileJournal.create(path, run="r"), Disk(monkeypatch)
    journal.append({"kind": "one"})
    journal.sync()
    journal.sync()
    assert disk.flushes == 1
    journal.close()


def test_after_a_failed_flush_the_journal_is_dead_and_never_tries_again(path, monkeypatch):
    journal, disk = FileJournal.create(path, run="r"), Disk(monkeypatch)
    journal.append({"kind": "one"})
    disk.error = errno.EIO
    with pytest.raises(StoreError, match="could not be made durable: Input/output error"):
        journal.sync()
    disk.error = 0
    for attempt in (journal.sync, lambda: journal.append({"kind": "two"})):
        with pytest.raises(StoreError, match="could not be made durable"):
            attempt()
    journal.close()
    assert disk.flushes == 1


def test_a_full_disk_is_told_and_the_records_are_written_once_there_is_room(path, monkeypatch):
    journal = FileJournal.create(path, run="r")
    journal.append({"kind": "one"})
    journal.sync()
    size, real = path.stat().st_size, os.pwrite

    def full(handle: int, data: bytes, offset: int) -> int:
        if offset >= size + 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[:10], offset)

    monkeypatch.setattr(os, "pwrite", full)
    journal.append({"kind": "two"})
    for _ in range(2):
        with pytest.raises(DiskFull, match="no room left"):
            journal.sync()
        assert path.stat().st_size == size, "no half record stays behind"
    monkeypatch.undo()
    journal.append({"kind": "three"})
    journal.close()
    assert opened(path) == (["one", "two", "three"], [])


def test_opening_writes_anew_what_the_last_server_could_not_flush(path, monkeypatch):
    """A flush that failed leaves pages that count as written: flushing them again does nothing."""
    written(path, ["one"])
    old, flushed = path.stat().st_ino, []
    real = os.fsync

    def fsync(handle: int) -> None:
        flushed.append(os.fstat(handle).st_ino)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    assert opened(path) == (["one"], [])
    new = path.stat().st_ino
    assert new != old
    assert flushed == [new, path.parent.stat().st_ino]


def test_a_closed_journal_takes_nothing_more(path):
    journal = FileJournal.create(path, run="r")
    journal.close()
    with pytest.raises(StoreError, match="is closed"):
        journal.append({"kind": "one"})
    journal.close()


# Deleted or replaced while it is open


@pytest.mark.parametrize("name", ["journal", "run.json"])
@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_more_is_durable_once_a_file_is_gone_or_another(tmp_path, name, replaced):
    path, beside = tmp_path / "journal", tmp_path / "run.json"
    beside.write_text("{}")
    journal = FileJournal.create(path, run="r")
    journal.stands_with(beside)
    journal.append({"kind": "end"})
    journal.sync()
    journal.check()
    victim = tmp_path / name
    if replaced:
        (tmp_path / "copy").write_bytes(victim.read_bytes())
        os.replace(tmp_path / "copy", victim)
    else:
        victim.unlink()
    journal.append({"kind": "end"})
    for act in (journal.sync, journal.check, journal.sync):
        with pytest.raises(StoreError, match="replaced" if replaced else "deleted") as no:
            act()
        assert no.value.exit_code == 5 and "--from-regions" in (no.value.hint or "")


def test_a_journal_may_begin_above_the_numbers_of_another(tmp_path):
    journal = FileJournal.create(tmp_path / "journal", run="r", base=1000)
    assert journal.append({"kind": "rebuilt"}) == 1001
    journal.close()
    again, records = FileJournal.open(tmp_path / "journal")
    assert again.last == 1001 and again.base == 1000 and records == [{"kind": "rebuilt"}]
    snapshot = again.append({"kind": "snapshot"})
    again.compact(snapshot)
    again.close()
    short = read_journal(tmp_path / "journal")
    assert (short.base, short.last.number) == (1001, 1002)
