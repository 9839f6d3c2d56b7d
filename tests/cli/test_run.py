"""Commands answer wrong questions with a sentence, a hint and the documented exit code."""

import contextlib
import fcntl
import http.server
import json
import os
import socket
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from diloco_cli.cli import run as run_commands
from diloco_cli.errors import LinkError, SpecError
from diloco_cli.observe.events import EventLog
from diloco_cli.run.folder import find, held, last_summary, runner_of, set_aside
from diloco_cli.run.goal import StopCondition, parse_goal
from diloco_cli.system.locks import FileLock
from tests.cli.harness import SPEC, diloco
from tests.observe.documents import make_status


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every test in a folder of its own, with a spec and without our environment variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("DILOCO_SERVER", "DILOCO_REGION"):
        monkeypatch.delenv(name, raising=False)
    Path("run.yaml").write_text(SPEC)


def a_run(name="tiny"):
    folder = Path("runs") / name
    (folder / "server").mkdir(parents=True)
    (folder / "spec.resolved.yaml").write_text(SPEC)
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Which region, which server


def test_a_region_needs_a_name_that_can_be_one(capsys):
    code, _, said = diloco(capsys, "work", "run.yaml", "--region", "Left!")
    assert code == 2 and "'Left!' cannot be the name of a region" in said


def test_whether_a_region_that_is_not_listed_may_join_is_for_the_server_to_say(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    asked = ("work", "run.yaml", "--region", "oslo", "--server", url, "--wait", "0.1")
    code, _, said = diloco(capsys, *asked)
    assert code == 4 and url in said


def test_a_worker_must_know_its_region_and_its_server(capsys, monkeypatch):
    code, _, said = diloco(capsys, "work", "run.yaml")
    assert code == 2 and "DILOCO_REGION" in said and "left, right" in said
    monkeypatch.setenv("DILOCO_REGION", "left")
    code, _, said = diloco(capsys, "work", "run.yaml")
    assert code == 2 and "DILOCO_SERVER" in said and "diloco serve" in said


def test_a_worker_without_a_server_gives_up_after_its_patience(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    asked = ("work", "run.yaml", "--region", "left", "--server", url, "--wait", "0.1")
    code, _, said = diloco(capsys, *asked)
    assert code == 4 and url in said and "hint:" in said


def test_regions_to_start_here_must_exist(capsys):
    code, _, said = diloco(capsys, "run", "run.yaml", "--regions", "left,rihgt")
    assert code == 2 and "Did you mean `right`?" in said
    code, _, said = diloco(capsys, "run", "run.yaml", "--regions", "")
    assert code == 2 and "names no region" in said and "left, right" in said


@pytest.mark.parametrize("command", ["run", "serve", "work"])
def test_a_wrong_spec_stops_every_command_before_anything_starts(capsys, command):
    Path("run.yaml").write_text(SPEC + "sinc: {}\n")
    code, _, said = diloco(capsys, command, "run.yaml")
    assert code == 2 and "run.yaml:" in said and "sinc" in said
    assert not Path("runs").exists()


# Goals


@pytest.mark.parametrize(
    "text",
    ["tokens", "tokens=", "miles=3", "steps=-1", "minutes=nan", "tokens=1.5", "steps=1e3"],
)
def test_a_goal_that_makes_no_sense_is_refused(capsys, text):
    code, _, said = diloco(capsys, "run", "run.yaml", "--until", text)
    assert code == 2 and f"--until {text}" in said and "minutes=10" in said


def test_goals_are_reached_by_tokens_steps_or_minutes():
    regions = [{"name": "left", "step": 10}, {"name": "right", "step": 30}]
    status = make_status(tokens={"applied": 1000}, regions=regions)
    assert parse_goal("tokens=1_000") == StopCondition("tokens", 1000)
    assert str(parse_goal("tokens=40000")) == "tokens=40_000"
    assert str(parse_goal("minutes=1.5")) == "minutes=1.5"
    assert StopCondition("tokens", 1000).reached(status, seconds=0)
    assert not StopCondition("tokens", 1001).reached(status, seconds=0)
    assert StopCondition("steps", 30).reached(status, seconds=0)
    assert not StopCondition("steps", 31).reached(status, seconds=0)
    assert StopCondition("minutes", 2).reached(None, seconds=120)
    assert not StopCondition("minutes", 2).reached(None, seconds=119)


# Folders


def test_a_run_is_found_by_spec_folder_name_url_or_as_the_newest():
    old, new = a_run("older"), a_run("tiny")
    os.utime(old / "spec.resolved.yaml", (1, 1))
    assert find("http://h:1/").url == "http://h:1"
    assert [find(asked).folder for asked in ("run.yaml", str(new), "tiny", None)] == [new] * 4
    assert find("older").folder == old


def test_the_environment_names_the_server_before_the_newest_run(monkeypatch):
    a_run()
    monkeypatch.setenv("DILOCO_SERVER", "http://agg:9")
    assert find(None).url == "http://agg:9"


@pytest.mark.parametrize("asked", ["nothing", "empty", None])
def test_what_is_no_run_is_said_to_be_none(asked):
    Path("empty").mkdir()
    with pytest.raises(SpecError):
        find(asked)


def test_an_old_run_is_set_aside_and_never_overwritten():
    for number in (1, 2):
        a_run()
        assert set_aside(Path("runs/tiny")) == Path(f"runs/tiny.old-{number}")
    assert set_aside(Path("runs/tiny")) is None


def test_a_folder_that_is_being_run_is_not_set_aside():
    folder = a_run()
    with held(folder), pytest.raises(SpecError, match="being run by process"):
        set_aside(folder)
    assert folder.exists()


@pytest.mark.parametrize("lock", ["server/lock", "regions/paris/lock", "regions/iowa/trainer.lock"])
def test_a_folder_in_which_somebody_still_writes_is_not_set_aside(lock: str):
    """What a killed `diloco run` leaves behind would go on under the old name, in the new run."""
    folder = a_run()
    (path := folder / lock).parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(SpecError, match=f"{path.parent.name} still run there"):
            set_aside(folder)
    assert folder.exists() and set_aside(folder)


def test_a_lock_ends_with_its_process():
    folder = a_run()
    code = (
        "import sys; from pathlib import Path; from diloco_cli.run.folder import held\n"
        "with held(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin and child.stdout and child.stdout.readline() == b"held\n"
    assert runner_of(folder) == child.pid and not FileLock(folder / "run.lock").is_free()
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert runner_of(folder) is None


def test_a_summary_counts_only_while_the_run_has_not_gone_on():
    folder = a_run()
    (folder / "summary.json").write_text('{"state": "stopped"}')
    assert (summary := last_summary(folder)) and summary.state == "stopped"
    (folder / "server" / "address.json").write_text("{}")
    later = time.time() + 10
    os.utime(folder / "server" / "address.json", (later, later))
    assert last_summary(folder) is None


# Commands about runs without a server


def test_the_status_of_a_finished_run_needs_no_server(capsys):
    folder = a_run()
    summary = {"state": "finished", "outer_steps": 7, "loss": {"heldout": 2.0, "first": 5.0}}
    (folder / "summary.json").write_text(json.dumps(summary))
    code, printed, _ = diloco(capsys, "status", folder, "--format", "json")
    assert code == 0
    assert json.loads(printed)["outer_steps"] == 7
    code, printed, _ = diloco(capsys, "status", folder)
    assert code == 0 and "finished" in printed


def test_without_a_server_the_last_known_state_is_shown_and_the_code_says_so(capsys):
    folder = a_run()
    EventLog(folder / "events.jsonl", "server").note("server-started", url="http://x")
    code, printed, said = diloco(capsys, "status", folder, "--format", "json")
    assert code == 4 and json.loads(printed)["state"] == "training"
    assert json.loads(printed)["reachable"] is False
    assert "has no server running" in said


def test_an_unreachable_url_is_exit_code_4(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    for command in ("status", "stop"):
        code, printed, said = diloco(capsys, command, url)
        assert (code, printed) == (4, "") and url in said and "hint:" in said


class Pages(http.server.BaseHTTPRequestHandler):
    """Some other program's web pages."""

    body = b"<h1>hello</h1>"

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def pages(kind):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Object(Pages):
    body = b'{"hello": "world"}'


class Missing(Pages):
    def do_GET(self):
        self.send_error(404)


@pytest.mark.parametrize("kind", [Pages, Object, Missing])
def test_what_is_not_a_diloco_server_is_said_to_be_none(capsys, kind):
    with pages(kind) as url:
        code, printed, said = diloco(capsys, "status", url)
    assert (code, printed) == (4, "")
    assert f"What answers at {url} is not a diloco server." in said
    assert "diloco status" not in said


def test_a_server_that_is_away_is_waited_for_by_who_watches(capsys, monkeypatch):
    script = [make_status(state="training"), LinkError("gone"), make_status(state="finished")]

    def answer(self, url):
        told = script.pop(0)
        if isinstance(told, Exception):
            raise told
        return told

    monkeypatch.setattr("diloco_cli.run.ask.ShortCalls.status", answer)
    monkeypatch.setattr("diloco_cli.cli.status.WATCH_SECONDS", 0.0)
    code, printed, _ = diloco(capsys, "status", "--watch", "http://h:1")
    lines = printed.splitlines()
    assert code == 0 and lines[0].startswith("training |")
    assert lines[1].startswith("server away (since ") and "Ctrl-C" in lines[1]
    assert "finished" in lines[2]


def test_who_watches_a_run_that_is_just_being_started_waits_for_its_server(capsys, monkeypatch):
    folder = a_run()

    def answer(self, url):
        assert url == "http://h:1"
        return make_status(state="finished")

    def wait(seconds):  # The server has come up meanwhile.
        (folder / "server" / "address.json").write_text('{"url": "http://h:1", "pid": 1}')

    monkeypatch.setattr("diloco_cli.run.ask.ShortCalls.status", answer)
    monkeypatch.setattr("diloco_cli.cli.status.time.sleep", wait)
    with held(folder):
        code, _, said = diloco(capsys, "status", folder)
        assert code == 4 and f"diloco status --watch {folder}" in said
        code, printed, said = diloco(capsys, "status", "--watch", folder)
    assert code == 0 and "finished" in printed
    assert said.strip().endswith(f"started by process {os.getpid()}; waiting for it.")
    code, _, said = diloco(capsys, "status", "--watch", folder)
    assert code == 4 and "starts it again" in said


@pytest.fixture
def terminal(monkeypatch):
    """Standard input is a terminal; what is written to this handle is pressed there."""
    ours, theirs = os.openpty()
    with open(theirs, closefd=False) as opened:
        monkeypatch.setattr("sys.stdin", opened)
        yield ours
    os.close(ours)
    os.close(theirs)


def test_keys_end_the_watching_and_show_the_page(capsys, monkeypatch, terminal):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    always = make_status(state="training", url="http://h:1")
    monkeypatch.setattr("diloco_cli.run.ask.ShortCalls.status", lambda self, url: always)
    before = termios.tcgetattr(terminal)
    os.write(terminal, b"xroq")
    code, printed, _ = diloco(capsys, "status", "--watch", "http://h:1")
    assert code == 0 and printed.splitlines()[-1] == "The page of the run: http://h:1"
    assert termios.tcgetattr(terminal) == before


def test_a_regions_host_is_asked_for_the_url_of_the_server(capsys):
    folder = a_run()
    (folder / "server").rmdir()
    (folder / "regions").mkdir()
    for command in ("status", "stop", "pull"):
        code, _, said = diloco(capsys, command, folder)
        assert code == 4 and f"`diloco {command} URL`" in said and "DILOCO_SERVER" in said
        assert "diloco run" not in said


def test_a_killed_server_leaves_its_figures_in_the_run_log(capsys):
    folder = a_run()
    log = EventLog(folder / "events.jsonl", "server")
    log.note("server-started", url="http://x", recovered=0)
    log.note("evaluated", region="left", versions=[0], loss=5.5)
    log.note("published", fragment=0, version=1, tokens=4096.0)
    code, printed, _ = diloco(capsys, "status", folder)
    assert code == 4 and "4096 of 100.0k" in printed and "5.500" in printed
    assert "last heard of at" in printed


def test_a_pipe_gets_lines_as_long_as_they_are(capsys, monkeypatch):
    why = "waiting " * 30
    told = make_status(regions=[{"name": "left", "alive": True, "why": why + "end"}])
    monkeypatch.setattr("diloco_cli.run.ask.ShortCalls.status", lambda self, url: told)
    _, printed, _ = diloco(capsys, "status", "http://h:1")
    assert why + "end" in printed
    assert [line for line in printed.splitlines() if line != line.rstrip()] == []


def test_stopping_what_does_not_run_is_no_failure(capsys):
    code, _, said = diloco(capsys, "stop", a_run())
    assert code == 0 and "not running" in said


def test_pulling_from_a_run_that_never_began_says_so(capsys):
    code, _, said = diloco(capsys, "pull", a_run(), "--out", "w.safetensors")
    assert code == 2 and "no weights yet" in said
    code, _, said = diloco(capsys, "pull", "runs/tiny", "--out", "no/such/w.safetensors")
    assert code == 2 and "no folder no/such" in said
    code, _, said = diloco(capsys, "pull", "runs/tiny", "--out", "runs")
    assert code == 2 and "runs is a folder" in said
    code, _, said = diloco(capsys, "pull", "runs/tiny", "--out", "/proc/weights")
    assert code == 2 and "/proc/weights cannot be written" in said and "--out" in said


# diloco run, before it starts


def finished_run() -> Path:
    from diloco_cli.assemble import load_run, spelled_out
    from diloco_cli.spec.resolved import write_resolved

    folder = Path("runs/tiny")
    write_resolved(spelled_out(load_run("run.yaml").spec), folder)
    (folder / "summary.json").write_text('{"state": "finished", "outer_steps": 7}')
    return folder


def test_a_finished_run_shows_its_summary_and_is_done(capsys):
    folder = finished_run()
    code, printed, said = diloco(capsys, "run", "run.yaml")
    assert code == 0 and "finished" in printed and "--fresh" in said
    assert not (folder / "logs").exists()


@pytest.mark.parametrize("extra", [(), ("--detach",), ("--fresh",)])
def test_a_folder_is_run_once_at_a_time(capsys, extra):
    with held(Path("runs/tiny")):
        code, _, said = diloco(capsys, "run", "run.yaml", *extra)
    assert code == 2 and f"process {os.getpid()}" in said and "diloco status runs/tiny" in said


@pytest.mark.parametrize("command", ["run", "serve", "work"])
@pytest.mark.parametrize("extra", [(), ("--fresh",)])
def test_a_folder_of_something_else_is_left_alone(capsys, command, extra):
    Path("photos").mkdir()
    Path("photos/cat.jpg").touch()
    asked = [command, "run.yaml", "--dir", "photos", *(extra if command == "run" else ())]
    asked += ["--region", "left"] if command == "work" else []
    code, _, said = diloco(capsys, *asked)
    assert code == 2 and "cat.jpg" in said and "another --dir" in said
    assert [path.name for path in Path("photos").iterdir()] == ["cat.jpg"]
    code, _, said = diloco(capsys, "run", "run.yaml", "--dir", "run.yaml")
    assert code == 2 and "run.yaml is a file" in said


def test_a_second_server_of_a_folder_is_a_wrong_command(capsys):
    folder = a_run()
    with (folder / "server" / "lock").open("w") as lock:
        lock.write("123\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, said = diloco(capsys, "serve", "run.yaml")
    assert code == 2 and "in use by another server (process 123)" in said


def test_a_folder_that_cannot_be_made_is_exit_code_5(capsys):
    Path("runs").write_text("in the way")
    code, _, said = diloco(capsys, "run", "run.yaml")
    assert code == 5 and "cannot be written" in said and "--dir" in said


def test_printed_commands_can_be_pasted(tmp_path, monkeypatch):
    script = tmp_path / "bin" / "diloco"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(script), "run"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert run_commands.program() == str(script)
    monkeypatch.setenv("PATH", str(script.parent))
    assert run_commands.program() == "diloco"
    monkeypatch.setattr("sys.argv", ["/x/diloco_cli/__main__.py", "run"])
    assert run_commands.program().endswith(" -m diloco_cli")


def test_a_run_that_logs_as_json_says_everything_so(capsys):
    finished_run()
    code, printed, said = diloco(capsys, "run", "run.yaml", "--log-format", "json")
    assert (code, printed) == (0, "")
    (line,) = map(json.loads, said.splitlines())
    assert line["process"] == "run" and "is finished" in line["message"]
