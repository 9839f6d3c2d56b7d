"""The log of a process that we start: of a bounded size, and its last words are found."""

from __future__ import annotations

import os

import pytest

from diloco_cli.system.process_end import LastWords
from diloco_cli.system.process_log import ProcessLog


@pytest.fixture
def log(tmp_path) -> ProcessLog:
    return ProcessLog(tmp_path / "logs" / "paris.log", most=100)


def sizes(log: ProcessLog) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in log.path.parent.iterdir()}


def test_a_process_that_goes_on_writing_has_two_files_of_a_bounded_size(log):
    with log.opened() as output:
        for _ in range(20):
            os.write(output.fileno(), b"0123456789" * 7 + b"\n")
            log.keep_small()
    assert sizes(log) == {"paris.log": 0, "paris.log.1": 100}
    assert log.path.with_name("paris.log.1").read_bytes().endswith(b"\n")


def test_a_process_that_wrote_far_too_much_leaves_the_end_of_it(log):
    with log.opened() as output:
        os.write(output.fileno(), b"x" * 5000 + b"error: no such file\n")
    log.keep_small()
    assert sizes(log) == {"paris.log": 0, "paris.log.1": 100}
    assert log.last_words() == LastWords("x" * 80 + "error: no such file")


def test_a_log_that_is_small_enough_stays_as_it_is(log):
    with log.opened() as output:
        os.write(output.fileno(), b"x" * 100)
    log.keep_small()
    assert sizes(log) == {"paris.log": 100}


def test_starts_that_fail_at_once_bound_it_too(log):
    for _ in range(20):
        with log.opened() as output:
            os.write(output.fileno(), b"error: no such file\n" * 3)
    assert sizes(log)["paris.log"] <= 160 and sizes(log)["paris.log.1"] == 100


def test_last_words_are_found_on_both_sides_of_the_cut_and_are_no_earlier_starts(log):
    with log.opened() as output:
        os.write(output.fileno(), b"error: of an earlier start\n" * 3)
    with log.opened() as output:
        os.write(output.fileno(), b"loading the weights of the model\n")
        log.keep_small()
        assert log.last_words() == LastWords("loading the weights of the model")
        os.write(output.fileno(), b"compiling the step of the model, which takes\n")
        os.write(output.fileno(), b"error: no such file\n  hint: make it\n")
        assert log.last_words() == LastWords("no such file", "make it")
        os.write(output.fileno(), b"2026-11-18T01:02:03.456+00:00 INFO x\n")
        log.keep_small()
        assert sizes(log)["paris.log"] == 0
        assert log.last_words() == LastWords("no such file", "make it")
    log.begin()
    assert not log.last_words()


def test_a_log_that_is_not_there_has_no_last_words(log):
    log.keep_small()
    assert not log.last_words() and not log.path.exists()
