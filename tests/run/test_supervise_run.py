"""`diloco run` starts, watches, restarts and stops real processes, which here pretend to train."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from diloco_cli.errors import LinkError, QuorumLost, RunFailed, SpecError, StoreError
from diloco_cli.launch import Role
from diloco_cli.launch.subprocesses import LocalLauncher
from diloco_cli.launch.supervise import Patience
from diloco_cli.observe.events import read_events
from diloco_cli.observe.status import Status
from diloco_cli.observe.terminal import ProgressDisplay
from diloco_cli.run import supervise_run as run_module
from diloco_cli.run.folder import held
from diloco_cli.run.goal import StopCondition
from diloco_cli.run.supervise_run import LocalRun, LocalRunPlan
from tests.observe.documents import status_json

SERVER = """
import http.server, json, os, pathlib, signal, sys, threading
folder = pathlib.Path(sys.argv[1])
class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        state = (folder / "state").read_text() if (folder / "state").exists() else "training"
        started = len(list(folder.glob("started-*")))
        status = json.loads(sys.argv[2])
        status["state"], status["regions"][0]["step"] = state, started
        body = json.dumps(status).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        (folder / "state").write_text("stopped")
        self.do_GET()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
(folder / "server").mkdir(exist_ok=True)
address = {"url": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid()}
draft = folder / "server" / "draft"
draft.write_text(json.dumps(address))
draft.rename(folder / "server" / "address.json")
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
server.serve_forever()
"""

WORKER = """
import os, pathlib, signal, sys, time
folder, region = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / f"started-{region}-{os.getpid()}").touch()
state = folder / "state"
while not state.exists() or state.read_text() not in ("finished", "stopped"):
    time.sleep(0.02)
"""

STATUS = json.dumps(
    status_json(tokens={"applied": 10, "budget": 20}, regions=[{"name": "left", "alive": True}])
)

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class PlainLink:
    def status(self, url):
        return Status.read(self._ask(url + "/v1/status", None))

    def stop(self, url):
        self._ask(url + "/v1/stop", b"")

    def _ask(self, url, body):
        try:
            with urllib.request.urlopen(url, body, timeout=3) as answer:
                return answer.read()
        except (OSError, urllib.error.URLError):
            raise LinkError(f"{url} does not answer.") from None


def python(name, code, *arguments):
    return Role(name, (sys.executable, "-c", code, *map(str, arguments)))


def saying(code, text):
    return f"import sys; sys.stderr.write({text!r}); sys.exit({code})"


@pytest.fixture
def run_of(tmp_path):
    """Makes a run of two regions whose processes can be replaced; afterwards none may live."""

    def make(server=SERVER, workers=None, quorum=1, elsewhere=0, goal=None, grace=20.0):
        codes = workers or {}
        plan = LocalRunPlan(
            folder=tmp_path,
            regions=("left", "right"),
            elsewhere=elsewhere,
            quorum=quorum,
            serve=replace(
                python("server", server, tmp_path, STATUS),
                address=tmp_path / "server" / "address.json",
            ),
            work=lambda region, url: python(region, codes.get(region, WORKER), tmp_path, region),
            goal=goal,
        )
        progress = ProgressDisplay(Console(file=io.StringIO(), width=200))
        launcher = LocalLauncher(tmp_path / "logs")
        patience = Patience(first=0.05, largest=0.1, tries=3)
        return LocalRun(
            plan, launcher, PlainLink(), progress, patience=patience, grace=grace, poll=0.1
        )

    yield make
    everybody = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert [command for command in everybody if str(tmp_path) in command] == []


def starts(folder, region):
    return sorted(folder.glob(f"started-{region}-*"))


def meanwhile(*deeds):
    """Does things beside the run, each as soon as its condition holds."""

    def do():
        deadline = time.monotonic() + 30
        for ready, deed in deeds:
            while time.monotonic() < deadline and not ready():
                time.sleep(0.02)
            deed()

    thread = threading.Thread(target=do)
    thread.start()
    return thread


def both_started(folder):
    return lambda: starts(folder, "left") and starts(folder, "right")


def spoken(run):
    return run.progress.console.file.getvalue()


def test_a_run_ends_when_the_server_says_finished_and_the_workers_have_left(run_of, tmp_path):
    beside = meanwhile(
        (both_started(tmp_path), lambda: (tmp_path / "state").write_text("finished"))
    )
    run = run_of()
    assert run.run() == 0
    beside.join()
    assert run.summary().state == "finished"
    assert json.loads((tmp_path / "summary.json").read_text())["tokens"]["applied"] == 10


LEFT_BEHIND = """
import fcntl, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1]) / "regions" / "left"
folder.mkdir(parents=True)
lock = os.open(folder / "trainer.lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, f"{os.getpid()}\\n".encode())
print("here", flush=True)
time.sleep(600)
"""


def test_a_trainer_that_outlived_its_worker_does_not_outlive_the_run(run_of, tmp_path):
    command = [sys.executable, "-c", LEFT_BEHIND, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as trainer:
        assert trainer.stdout and trainer.stdout.readline()
        beside = meanwhile(
            (both_started(tmp_path), lambda: (tmp_path / "state").write_text("finished"))
        )
        assert run_of().run() == 0
        beside.join()
        assert trainer.wait(20) == -signal.SIGKILL


def test_a_killed_worker_and_a_killed_server_come_back(run_of, tmp_path):
    def pid_of_server():
        return json.loads((tmp_path / "server" / "address.json").read_text())["pid"]

    first = []

    def kill_both():
        first.append(pid_of_server())
        os.kill(int(starts(tmp_path, "left")[0].name.rpartition("-")[2]), signal.SIGKILL)
        os.kill(first[0], signal.SIGKILL)

    beside = meanwhile(
        (both_started(tmp_path), kill_both),
        (
            lambda: len(starts(tmp_path, "left")) == 2 and pid_of_server() != first[0],
            lambda: (tmp_path / "state").write_text("finished"),
        ),
    )
    run = run_of()
    assert run.run() == 0
    beside.join()
    kinds = [event.kind for event in read_events(tmp_path / "events.jsonl")]
    assert set(kinds) == {"server-restarted", "worker-restarted"}
    assert "left died: killed by SIGKILL" in spoken(run)


def test_a_server_that_cannot_start_gives_its_reason_and_its_code(run_of):
    text = "error: 127.0.0.1:80 is taken.\n\nhint: set server.listen\n"
    with pytest.raises(LinkError, match="is taken") as caught:
        run_of(server=saying(4, text)).run()
    assert caught.value.hint == "set server.listen"


def test_workers_that_can_never_start_end_the_run_with_their_code(run_of):
    broken = saying(2, "error: data.files: no file matches 'x'.\n\nhint: look\n")
    run = run_of(workers={"left": broken, "right": broken})
    with pytest.raises(SpecError, match="no file matches"):
        run.run()
    summary = run.summary()
    assert summary.state == "stopped" and "no file matches 'x'" in summary.why
    assert "no file matches" in summary.regions["left"].failed


def test_one_lost_region_is_fatal_only_below_the_quorum(run_of, tmp_path):
    broken = saying(5, "error: the checkpoint is damaged\n")
    with pytest.raises(QuorumLost, match=r"a round needs 2.*the checkpoint is damaged"):
        run_of(workers={"left": broken}, quorum=2).run()

    beside = meanwhile(
        (
            lambda: any(e.kind == "worker-gone" for e in read_events(tmp_path / "events.jsonl")),
            lambda: (tmp_path / "state").write_text("finished"),
        )
    )
    run = run_of(workers={"left": broken}, quorum=1)
    assert run.run() == 0
    beside.join()
    assert "left failed: the checkpoint is damaged" in spoken(run)
    assert run.summary().regions["left"].failed == "the checkpoint is damaged"


def test_a_worker_that_dies_again_and_again_is_given_up(run_of):
    broken = saying(1, "error: out of luck\n")
    with pytest.raises(RunFailed, match="out of luck"):
        run_of(workers={"left": broken, "right": broken}).run()


def test_regions_elsewhere_keep_a_run_alive(run_of):
    leave = saying(0, "")
    run = run_of(workers={"left": leave}, elsewhere=1, goal=StopCondition("steps", 1))
    assert run.run() == 0
    assert "reached --until steps=1; stopping" in spoken(run)


def test_when_everybody_has_left_the_run_does_not_wait_for_ever(run_of):
    leave = saying(0, "")
    with pytest.raises(QuorumLost, match="all others have left"):
        run_of(workers={"left": leave, "right": leave}, grace=0.5).run()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_in_good_order(run_of, tmp_path, number):
    beside = meanwhile((both_started(tmp_path), lambda: os.kill(os.getpid(), number)))
    run = run_of()
    assert run.run() == 128 + number
    beside.join()
    assert run.summary().state == "stopped"
    assert run.summary().why == f"{signal.Signals(number).name} received"


def test_a_second_signal_kills_at_once(run_of, tmp_path):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    run = run_of(workers={"left": STUBBORN, "right": STUBBORN}, grace=600)
    beside = meanwhile(
        (lambda: len(run._workers) == 2, interrupt),
        (lambda: "stopping" in spoken(run), interrupt),
    )
    assert run.run() == 130
    beside.join()


def test_a_signal_before_the_server_listens_is_heard_too(run_of):
    run = run_of(server=STUBBORN, grace=0.5)
    beside = meanwhile((lambda: run._server.handle, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert run.run() == 143
    beside.join()


def test_a_goal_stops_the_run_and_that_is_a_success(run_of):
    run = run_of(goal=StopCondition("tokens", 10))
    assert run.run() == 0
    assert run.summary().state == "stopped"
    assert run.summary().why == "reached --until tokens=10"


def test_the_summary_is_flushed_before_it_takes_the_place_of_the_last_one(
    run_of, tmp_path, monkeypatch
):
    flushed, replaced = [], []
    fsync, replace_file = os.fsync, os.replace

    def flush(handle):
        flushed.append(os.fstat(handle).st_ino)
        fsync(handle)

    def take_place(draft, path):
        if Path(path).name == "summary.json":
            replaced.append(os.stat(draft).st_ino in flushed)
            flushed.clear()
        replace_file(draft, path)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", take_place)
    assert run_of(goal=StopCondition("tokens", 10)).run() == 0
    assert replaced == [True], "the draft, before it is renamed"
    assert tmp_path.stat().st_ino in flushed, "the name, after that"


def test_a_folder_that_cannot_be_written_is_said_to_be_so(run_of, tmp_path):
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        run_of().run()


def test_what_an_earlier_run_left_draining_is_waited_for(run_of, tmp_path):
    (tmp_path / "server").mkdir()
    lock = tmp_path / "server" / "lock"
    holder = python("x", "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2);"
                         "print('held', flush=True); sys.stdin.read()", lock)  # fmt: skip
    child = LocalLauncher(tmp_path / "logs").start(holder)
    meanwhile((lambda: "held" in (tmp_path / "logs" / "x.log").read_text(), lambda: None)).join()
    run = run_of(goal=StopCondition("tokens", 1))
    beside = meanwhile((lambda: "waiting for an earlier run" in spoken(run), child.kill))
    assert run.run() == 0
    beside.join()
    assert "let go of: server" in spoken(run)


def test_a_folder_in_which_others_run_is_left_as_it_is(run_of, tmp_path, monkeypatch):
    """Neither their trainers are ended nor is their run called over."""
    monkeypatch.setattr(run_module, "PREDECESSOR_SECONDS", 0.0)
    (tmp_path / "server").mkdir()
    with (tmp_path / "server" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = run_of()
        trainer = _a_trainer_of(tmp_path / "regions" / run.plan.regions[0])
        try:
            with pytest.raises(RunFailed, match="is in use"):
                run.run()
            assert trainer.poll() is None
        finally:
            trainer.kill()
            trainer.wait()
    assert not (tmp_path / "summary.json").exists()


def _a_trainer_of(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a region's trainer lock as a trainer does."""
    folder.mkdir(parents=True, exist_ok=True)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from diloco_cli.worker.mailbox import TRAINER_LOCK, Mailbox\n"
        "with Mailbox(Path(sys.argv[1])).locked(TRAINER_LOCK):\n"
        "    print('held', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    with child.stdout as said:
        assert said.readline() == "held\n"
    return child


def test_one_folder_is_run_by_one_process(tmp_path):
    with held(tmp_path), pytest.raises(SpecError, match=f"process {os.getpid()}"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


def test_a_run_that_its_server_gave_up_fails_with_the_reason(run_of, tmp_path):
    hopeless = json.dumps({**json.loads(STATUS), "hopeless": "all work is thrown away."})
    beside = meanwhile((both_started(tmp_path), lambda: (tmp_path / "state").write_text("stopped")))
    run = run_of(server=SERVER.replace("json.loads(sys.argv[2])", f"json.loads({hopeless!r})"))
    with pytest.raises(RunFailed, match="all work is thrown away") as failed:
        run.run()
    beside.join()
    assert failed.value.exit_code == 1 and "outer.lr" in (failed.value.hint or "")
