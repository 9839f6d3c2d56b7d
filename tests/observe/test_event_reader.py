"""Every line once and in order, whatever becomes of the file between two looks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO

import pytest

from diloco_cli.observe import event_file
from diloco_cli.observe.event_file import BATCH_BYTES, EventFile, EventReader, newest_id, older
from diloco_cli.observe.events import EventLog, read_events


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def log(path) -> EventFile:
    """Two lines of five bytes have room in a file."""
    return EventFile(path, most=10)


def write(log: EventFile, *numbers: int) -> None:
    for number in numbers:
        log.write(b"%04d\n" % number)


def rest(reader: EventReader) -> list[int]:
    found = []
    while lines := reader.more():
        found += [int(line.text) for line in lines]
    return found


def after(path: Path, place: str | None) -> list[int]:
    return rest(EventReader(path, place))


def ids(path: Path) -> list[str]:
    reader, found = EventReader(path), []
    while lines := reader.more():
        found += [line.id for line in lines]
    return found


def test_both_files_are_read_the_older_one_first(path, log):
    assert after(path, "0") == []
    write(log, 1, 2)
    assert after(path, "0") == [1, 2]
    write(log, 3)
    assert older(path).exists() and after(path, "0") == [1, 2, 3]
    write(log, 4, 5)
    assert after(path, "0") == [3, 4, 5], "two generations are kept"


def test_a_reader_goes_on_over_any_number_of_files(path, log):
    reader, told = EventReader(path), []
    for number in range(50):
        write(log, number)
        if number % 3 == 0:
            told += rest(reader)
    assert told + rest(reader) == list(range(50))


def test_an_id_stays_good_when_its_file_is_moved(path, log):
    write(log, 1, 2)
    one, two = ids(path)
    assert after(path, one) == [2] and after(path, two) == []
    write(log, 3)
    assert after(path, one) == [2, 3] and after(path, two) == [3]


def test_an_id_whose_file_is_gone_is_answered_with_all_that_is_kept(path, log):
    write(log, 1, 2)
    one, two = ids(path)
    # The file system may well give the last file the inode that the first one had.
    write(log, 3, 4, 5, 6)
    assert after(path, one) == after(path, two) == [3, 4, 5, 6]
    assert after(path, "0123456789ab-5") == [3, 4, 5, 6]


def test_a_number_is_a_place_in_the_newest_file(path, log):
    write(log, 1, 2)
    assert after(path, "5") == [2] and after(path, "10") == []
    assert after(path, "7") == [], "the rest of a line is left out"
    write(log, 3)
    assert after(path, "5") == [] and after(path, "0") == [1, 2, 3]
    assert after(path, "6") == after(path, "999999999999999999") == [1, 2, 3], "beyond the size"


@pytest.mark.parametrize("asked", [None, "", "-1", "now", "5-5", "0x5", "1" * 19, "A" * 12 + "-5"])
def test_whatever_else_is_asked_for_means_from_now_on(path, log, asked):
    write(log, 1, 2)
    reader = EventReader(path, asked)
    assert rest(reader) == []
    write(log, 3)
    assert rest(reader) == [3]


@pytest.mark.parametrize("before", [0, 1, 2, 3, 4])
def test_the_newest_id_is_where_news_begin(path, log, before):
    write(log, *range(before))
    place = newest_id(path)
    assert after(path, place) == []
    write(log, 7, 8)
    assert after(path, place) == [7, 8]


def test_from_now_on_before_there_is_a_file_means_everything(path, log):
    reader, place = EventReader(path, None), newest_id(path)
    write(log, 1, 2, 3)
    assert rest(reader) == after(path, place) == [1, 2, 3]


def test_a_line_that_came_late_is_given_without_an_id(path, log):
    write(log, 1, 2, 3)
    reader = EventReader(path)
    assert rest(reader) == [1, 2, 3]
    with open(older(path), "ab") as file:
        file.write(b"0009\n")
    [late] = reader.more()
    assert (int(late.text), late.id) == (9, "")
    write(log, 4)
    assert rest(reader) == [4]


def test_a_file_that_is_moved_during_a_look_is_neither_missed_nor_read_again(
    path, log, monkeypatch
):
    write(log, 1, 2, 3)
    reader = EventReader(path)
    assert rest(reader) == [1, 2, 3]

    def overtaken(opened: Path, how: str) -> BinaryIO:
        monkeypatch.delattr(event_file, "open")
        file = io.BufferedReader(io.FileIO(opened))
        write(log, 4, 5)
        return file

    monkeypatch.setattr(event_file, "open", overtaken, raising=False)
    assert rest(reader) == [4, 5]


def test_after_a_deletion_only_the_new_file_is_read(path, log):
    write(log, 1, 2, 3)
    reader = EventReader(path)
    assert rest(reader) == [1, 2, 3]
    path.unlink()
    assert rest(reader) == []
    write(log, 4)
    assert rest(reader) == [4], "what the older file holds was read before"
    older(path).unlink()
    write(log, 5, 6)
    assert rest(reader) == [5, 6]


def test_a_file_that_was_emptied_is_read_from_its_start(path, log):
    write(log, 1, 2, 3)
    reader = EventReader(path)
    assert rest(reader) == [1, 2, 3]
    path.write_bytes(b"")
    write(log, 4)
    assert rest(reader) == [4]


def test_a_line_is_given_when_it_is_whole(path, log):
    reader = EventReader(path)
    for piece, told in [(b"00", []), (b"01\n0", [1]), (b"002", []), (b"\n", [2])]:
        with open(path, "ab") as file:
            file.write(piece)
        assert rest(reader) == told


def test_long_foreign_bytes_stop_nobody(path):
    log = EventLog(path, "server")
    log.note("note", why="before")
    log.close()
    with open(path, "ab") as file:
        file.write(b"\0" * 3 * BATCH_BYTES)
    for number in range(3000):
        log.note("note", why=f"{number}" * 20)
    assert len(list(read_events(path))) == 3001
