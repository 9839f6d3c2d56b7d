"""Log lines: when, how bad, who, what; the same as JSON; and nothing that looks like two."""

import json
import logging
import re
import subprocess
import sys

import pytest

from diloco_cli.system import logs
from diloco_cli.system.logs import LogFormat

log = logging.getLogger("diloco_cli.test")


@pytest.fixture
def set_up():
    yield logs.set_up
    logs.tear_down()


def test_a_line_says_when_with_its_zone_how_bad_who_and_what(set_up, capsys):
    set_up("worker", region="paris")
    log.info("joined as epoch %d", 1)
    (line,) = capsys.readouterr().err.splitlines()
    when = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
    assert re.fullmatch(rf"{when} INFO paris: joined as epoch 1", line)


@pytest.mark.parametrize(
    "process, region, extra, who",
    [
        ("server", None, {}, "server"),
        ("server", None, {"peer": "10.0.0.7"}, "server 10.0.0.7"),
        ("server", None, {"region": "paris"}, "paris server"),
        ("trainer", "paris", {}, "paris trainer"),
    ],
)
def test_who_speaks_and_of_whom(set_up, capsys, process, region, extra, who):
    set_up(process, region=region)
    log.warning("it broke", extra=extra)
    assert capsys.readouterr().err.endswith(f" WARNING {who}: it broke\n")


def test_json_is_one_object_per_line_without_empty_fields(set_up, capsys):
    set_up("worker", LogFormat.json, region="paris")
    log.info("two\nlines")
    logs.log_fatal("It broke.", "Mend it.")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert set(first) == {"time", "level", "process", "region", "message"}
    assert (first["level"], first["process"], first["region"]) == ("info", "worker", "paris")
    assert first["message"] == "two\nlines"
    assert (second["level"], second["hint"]) == ("error", "Mend it.")


def test_a_message_cannot_forge_a_second_line(set_up, capsys):
    set_up("server")
    log.info("refused x\n2026-11-18T00:00:00.000+00:00 ERROR server: all is lost")
    first, second = capsys.readouterr().err.splitlines()
    assert "refused x" in first and second.startswith("  2026-")


def test_children_log_in_the_same_form(set_up):
    assert logs.options() == []
    set_up("worker")
    assert logs.options() == []
    set_up("worker", LogFormat.json)
    assert logs.options() == ["--log-format", "json"]


def test_libraries_are_heard_when_they_warn_and_so_is_python(set_up):
    code = (
        "import logging, warnings; from diloco_cli.system import logs\n"
        "logs.set_up('server', logs.LogFormat.json)\n"
        "logging.getLogger('other').info('chatter')\n"
        "logging.getLogger('other').warning('careful')\n"
        "warnings.warn('old')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    messages = [json.loads(line)["message"] for line in ended.stderr.splitlines()]
    assert messages[0] == "careful" and "old" in messages[1] and len(messages) == 2


def test_a_process_without_a_log_says_its_last_error_itself(capsys):
    assert not logs.log_fatal("It broke.", None)
    assert capsys.readouterr().err == ""
