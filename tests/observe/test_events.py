"""The run log: whole lines of known kinds, from any number of writers, after any crash."""

import json
import subprocess
import sys

import pytest

from diloco_cli.observe.events import KINDS, LARGEST_LINE, EventLog, read_events


def log_at(tmp_path, process="server", now=1000.0):
    return EventLog(tmp_path / "events.jsonl", process, clock=lambda: now, steady=lambda: now)


def test_what_was_noted_can_be_read_back(tmp_path):
    log_at(tmp_path).note("published", fragment=3, version=42, bytes=1234)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event.kind, event.process, event.time) == ("published", "server", 1000.0)
    assert event.fields == {"fragment": 3, "version": 42, "bytes": 1234}


def test_seconds_count_from_the_start_of_the_process(tmp_path):
    ticks = iter([100.0, 107.5])
    log = EventLog(tmp_path / "e.jsonl", "left", steady=lambda: next(ticks))
    log.note("note", why="hello")
    assert next(read_events(tmp_path / "e.jsonl")).seconds == 7.5


def test_a_missing_log_is_an_empty_log(tmp_path):
    assert list(read_events(tmp_path / "nothing.jsonl")) == []


def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next_one(tmp_path):
    log_at(tmp_path).note("joined", region="paris", epoch=1)
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"kind": "joined", "reg')
    assert [event.kind for event in read_events(tmp_path / "events.jsonl")] == ["joined"]

    log_at(tmp_path).note("lapsed", region="paris")
    assert [e.kind for e in read_events(tmp_path / "events.jsonl")] == ["joined", "lapsed"]


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b"7\n", b"\xff\xfe\n", b'{"kind": 1}\n'])
def test_lines_that_are_no_events_are_left_out(tmp_path, line):
    (tmp_path / "events.jsonl").write_bytes(line)
    assert list(read_events(tmp_path / "events.jsonl")) == []


def test_unknown_kinds_and_fields_are_a_callers_mistake(tmp_path):
    with pytest.raises(ValueError, match="no event kind 'publishd'"):
        log_at(tmp_path).note("publishd")
    with pytest.raises(ValueError, match="has no field 'regoin'"):
        log_at(tmp_path).note("joined", regoin="paris")


def test_a_long_reason_is_cut_so_that_the_line_stays_one_write(tmp_path):
    log_at(tmp_path).note("refused", region="paris", why="x" * 10_000)
    line = (tmp_path / "events.jsonl").read_bytes()
    assert len(line) < LARGEST_LINE
    assert json.loads(line)["why"].endswith("…") and json.loads(line)["region"] == "paris"


def test_a_log_that_cannot_be_written_costs_the_line_and_not_the_run(tmp_path):
    (tmp_path / "file").write_text("in the way")
    EventLog(tmp_path / "file" / "events.jsonl", "server").note("note", why="lost")


def test_lines_of_several_processes_never_mix(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from diloco_cli.observe.events import EventLog\n"
        "log = EventLog(Path(sys.argv[1]), sys.argv[2])\n"
        "for n in range(200): log.note('note', why=sys.argv[2] * 300)"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), who]) for who in "abc"]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    events = list(read_events(path))
    assert len(events) == 600
    assert all(event.fields["why"] == event.process * 300 for event in events)


def test_every_kind_says_what_it_means():
    assert all(kind.meaning for kind in KINDS.values())
