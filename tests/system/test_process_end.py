"""How a process ended: its exit code in words, and the error its log ends with."""

import logging
import signal

import pytest

from diloco_cli.system import logs
from diloco_cli.system.logs import LogFormat
from diloco_cli.system.process_end import LastWords, exit_in_words, last_words


def test_exit_codes_have_words():
    assert exit_in_words(7) == "exit code 7"
    assert exit_in_words(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert exit_in_words(-200) == "killed by signal 200"


@pytest.mark.parametrize("form", LogFormat)
def test_the_error_that_ended_a_process_is_found_whatever_its_form(tmp_path, capsys, form):
    logs.set_up("worker", form, region="paris")
    logs.log_fatal("an earlier start failed", None)
    logs.log_fatal("two settings differ:\nlr\nseed", "Compare them.")
    logging.getLogger("diloco_cli").info("the last line is no error")
    logs.tear_down()
    log = tmp_path / "x.log"
    log.write_text(capsys.readouterr().err)
    assert last_words(log) == LastWords("two settings differ:\nlr\nseed", "Compare them.")


def test_an_error_before_there_is_a_log_is_found_too(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("loading\nerror: no such file\n\nhint: make it\n")
    assert last_words(log) == LastWords("no such file", "make it")
    assert last_words(log, since=log.stat().st_size) == LastWords()


def test_without_an_error_the_last_line_speaks_unless_it_is_ours(tmp_path):
    log = tmp_path / "x.log"
    assert not last_words(log)
    log.write_text("Traceback …\n  File x\nMemoryError: 8 GB\n\n")
    assert last_words(log) == LastWords("MemoryError: 8 GB")
    log.write_text("2026-11-18T01:02:03.456+00:00 INFO paris: joined as epoch 1\n")
    assert not last_words(log)
