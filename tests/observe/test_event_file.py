"""Two generations of a file that several processes write: bounded, whole, never in the way."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_cli.observe import event_file
from diloco_cli.observe.event_file import EventFile, older
from diloco_cli.observe.events import MOST_BYTES, EventLog, read_events

WRITER = """\
import sys
from pathlib import Path
from diloco_cli.observe.events import EventLog
path, name, lines, most = sys.argv[1:]
log = EventLog(Path(path), name, most=int(most))
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(lines)):
    log.note("note", why=name * 300, region=number)
"""
ON_REQUEST = """\
import sys
from pathlib import Path
from diloco_cli.observe.events import EventLog
log = EventLog(Path(sys.argv[1]), "child", most=int(sys.argv[2]))
for line in sys.stdin:
    log.note("note", why=line.strip())
    print("noted", flush=True)
"""
HOLDER = """\
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run" / "events.jsonl"


@contextlib.contextmanager
def child(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command, pipe = [sys.executable, "-c", code, *map(str, arguments)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def write_at_once(path: Path, *, names: str, lines: int, most: int) -> None:
    with contextlib.ExitStack() as begun:
        children = [begun.enter_context(child(WRITER, path, name, lines, most)) for name in names]
        for each in children:
            assert each.stdout and each.stdout.readline() == "ready\n"
        for each in children:
            assert each.stdin
            each.stdin.write("go\n")
            each.stdin.flush()
        assert [each.wait(120) for each in children] == [0] * len(names)


def numbers(path: Path) -> dict[str, list[int]]:
    """What is kept of each process, after a look whether every line is whole."""
    kept = defaultdict(list)
    for file in (older(path), path):
        # Between lines there may be an empty one: see EventFile._current.
        for line in filter(None, file.read_bytes().splitlines()):
            event = json.loads(line)
            assert event["why"] == event["process"] * 300
            kept[event["process"]].append(event["region"])
    return kept


def test_two_files_of_64_mib_are_kept(path):
    assert MOST_BYTES == 64 * 1024 * 1024
    log = EventLog(path, "server")
    log.note("note", why="first")
    os.truncate(path, MOST_BYTES - 4096)
    log.note("note", why="has room")
    assert not older(path).exists()
    os.truncate(path, MOST_BYTES)
    log.note("note", why="has none")
    assert older(path).stat().st_size == MOST_BYTES
    assert [event.fields["why"] for event in read_events(path)] == ["first", "has none"]


def test_processes_that_fill_one_file_and_go_on_in_the_next_lose_no_line(path):
    write_at_once(path, names="abc", lines=200, most=150_000)
    assert older(path).stat().st_size > 149_000 and path.stat().st_size < 150_000
    assert numbers(path) == {name: list(range(200)) for name in "abc"}
    assert len(list(read_events(path))) == 600


def test_who_opens_the_file_while_a_line_is_half_written_spoils_neither_line(path):
    path.parent.mkdir()
    first = b'{"kind": "note", "process": "a", "time": 1, "seconds": 1, "why": "slow"}\n'
    with open(path, "ab", buffering=0) as slow:
        slow.write(first[:30])
        newcomer = EventFile(path, most=10_000)
        newcomer._current()
        assert path.read_bytes() == first[:30] + b"\n", "half a line looks like one a crash left"
        # The kernel finishes a line before it begins the next, so the empty one comes after it.
        path.write_bytes(first + b"\n")
        newcomer.write(first.replace(b"slow", b"quick"))
    newcomer.close()
    assert [event.fields["why"] for event in read_events(path)] == ["slow", "quick"]


def test_after_many_files_the_newest_two_are_full_and_have_no_gaps(path):
    write_at_once(path, names="abcd", lines=400, most=30_000)
    assert older(path).stat().st_size > 29_000, "no file is moved before it is full"
    # Who finds the lock taken writes on where it is: a file may get longer, not much longer.
    assert older(path).stat().st_size + path.stat().st_size < 400_000 < 4 * 400 * 350
    for name, kept in numbers(path).items():
        assert kept == list(range(kept[0], 400)), f"{name} lost lines among those that are kept"
    assert [each.name for each in sorted(path.parent.iterdir())] == [path.name, older(path).name]


def test_a_process_goes_on_in_a_new_file_after_its_own_was_deleted(path):
    with child(ON_REQUEST, path, 10_000) as writer:
        assert writer.stdin and writer.stdout
        for why in ("one", "two", "three"):
            writer.stdin.write(f"{why}\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "noted\n"
            assert [event.fields["why"] for event in read_events(path)] == [why]
            path.unlink()


def test_who_did_not_move_the_file_follows_to_the_new_one(path):
    one, other = EventFile(path, most=100), EventFile(path, most=100)
    one.write(b"a" * 59 + b"\n")
    other.write(b"b" * 29 + b"\n")
    one.write(b"c" * 29 + b"\n")
    other.write(b"d" * 29 + b"\n")
    assert older(path).read_bytes() == b"a" * 59 + b"\n" + b"b" * 29 + b"\n"
    assert path.read_bytes() == b"c" * 29 + b"\n" + b"d" * 29 + b"\n"


def test_who_gets_the_lock_second_does_not_move_the_new_file(path, monkeypatch):
    first, second = EventFile(path, most=100), EventFile(path, most=100)
    first.write(b"a" * 49 + b"\n")
    second.write(b"b" * 29 + b"\n")

    def overtaken(file: int, how: int) -> None:
        monkeypatch.setattr(event_file.fcntl, "flock", real)
        second.write(b"c" * 39 + b"\n")
        real(file, how)

    real = fcntl.flock
    monkeypatch.setattr(event_file.fcntl, "flock", overtaken)
    first.write(b"d" * 39 + b"\n")
    assert older(path).read_bytes() == b"a" * 49 + b"\n" + b"b" * 29 + b"\n"
    assert path.read_bytes() == b"c" * 39 + b"\n" + b"d" * 39 + b"\n"


def test_nobody_waits_for_a_process_that_was_stopped_while_it_had_the_lock(path):
    log = EventLog(path, "server", most=300)
    log.note("note", why="a" * 100)
    with child(HOLDER, path) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        log.note("note", why="b" * 200)
        assert not older(path).exists() and path.stat().st_size > 300
    log.note("note", why="c")
    assert older(path).exists() and len(list(read_events(path))) == 3


def test_the_lines_of_a_run_that_was_set_aside_stay_with_it(path):
    log = EventLog(path, "server", most=300)
    log.note("note", why="before")
    aside = path.parent.rename(path.parent.with_name("run.old-1"))
    for number in range(5):
        log.note("note", why=f"after {number}")
    assert not path.parent.exists()
    moved = aside / path.name
    assert older(moved).exists() and list(read_events(moved))[-1].fields["why"] == "after 4"

    path.parent.mkdir()
    log.note("note", why="of the old run")
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_was_deleted_costs_the_lines_and_is_not_made_again(path):
    log = EventLog(path, "server")
    log.note("note", why="kept")
    shutil.rmtree(path.parent)
    log.note("note", why="lost")
    assert not path.parent.exists()


def test_a_file_that_cannot_be_moved_grows(path):
    older(path).mkdir(parents=True)
    log = EventLog(path, "server", most=300)
    for _ in range(5):
        log.note("note", why="x" * 100)
    assert len(path.read_bytes().splitlines()) == 5


def test_a_closed_log_can_be_written_again_and_leaves_nothing_open(path):
    open_before = len(os.listdir("/proc/self/fd"))
    log = EventLog(path, "server", most=300)
    for _ in range(9):
        log.note("note", why="x" * 100)
    log.close()
    log.close()
    assert len(os.listdir("/proc/self/fd")) == open_before
    log.note("note", why="again")
    assert list(read_events(path))[-1].fields["why"] == "again"
    log.close()
