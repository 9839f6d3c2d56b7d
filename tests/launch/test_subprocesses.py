"""Real children: they stop when asked, die when they must, and never outlive their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from diloco_cli.launch import Role
from diloco_cli.launch.cores import deal_cores
from diloco_cli.launch.roles import serve_role, work_role
from diloco_cli.launch.subprocesses import LocalLauncher
from diloco_cli.system.process_end import LastWords

UNTIL_EOF = "import sys; print('up', flush=True); sys.stdin.read(); print('parent gone')"
STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)"
)


def python(name: str, code: str, *arguments: str) -> Role:
    return Role(name, (sys.executable, "-c", code, *arguments))


def eventually(what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def launcher(tmp_path):
    return LocalLauncher(tmp_path / "logs")


def test_what_a_child_says_is_in_its_log(launcher):
    child = launcher.start(
        python("left", "import sys; print('out'); print('err', file=sys.stderr)")
    )
    assert eventually(lambda: child.exit_code() is not None)
    assert set((launcher.logs / "left.log").read_text().split()) == {"out", "err"}


def test_the_log_of_a_child_is_kept_small_while_it_runs(launcher):
    writes = "import os, sys; os.write(2, b'x' * (17 << 20)); sys.stdin.read()"
    child = launcher.start(python("much", writes))
    older = launcher.logs / "much.log.1"
    assert eventually(lambda: child.exit_code() is None and older.exists())
    launcher.stop([child], grace=0.0)
    assert (launcher.logs / "much.log").stat().st_size == 0


def test_a_child_that_listens_is_asked_and_not_killed(launcher):
    polite = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    child = launcher.start(python("left", polite))
    eventually(lambda: "up" in (launcher.logs / "left.log").read_text())
    launcher.stop([child], grace=20)
    assert child.exit_code() == 0


def test_a_child_that_does_not_listen_is_killed_with_all_it_started(launcher):
    child = launcher.start(python("left", STUBBORN))
    grandchild = int(eventually((launcher.logs / "left.log").read_text))
    launcher.stop([child], grace=0.2)
    assert child.exit_code() == -signal.SIGKILL
    eventually(lambda: gone(grandchild))


def test_children_see_the_end_of_a_parent_that_was_killed(tmp_path):
    parent_code = (
        "import sys, time; from pathlib import Path\n"
        "from diloco_cli.launch import Role\n"
        "from diloco_cli.launch.subprocesses import LocalLauncher\n"
        "launcher = LocalLauncher(Path(sys.argv[1]))\n"
        "for name in ('server', 'left'):\n"
        "    child = launcher.start(Role(name, (sys.executable, '-c', sys.argv[2])))\n"
        "    print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path), UNTIL_EOF], stdout=subprocess.PIPE
    )
    assert parent.stdout
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    for name in ("server", "left"):
        eventually(lambda name=name: "up" in (tmp_path / f"{name}.log").read_text())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for pid in pids:
        eventually(lambda pid=pid: gone(pid))
    assert "parent gone" in (tmp_path / "server.log").read_text()


def test_a_child_has_its_own_session_so_that_ctrl_c_reaches_only_the_parent(launcher):
    child = launcher.start(python("left", UNTIL_EOF))
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    launcher.stop([child], grace=0)


def test_last_words_are_the_error_and_hint_of_this_start_only(launcher):
    code = "import sys; print(sys.argv[1]); sys.exit(2)"
    first = launcher.start(python("left", code, "loading\nerror: no such file\n\nhint: make it"))
    eventually(lambda: first.exit_code() == 2)
    assert first.last_words() == LastWords("no such file", "make it")

    second = launcher.start(python("left", code, "all is well"))
    eventually(lambda: second.exit_code() == 2)
    assert second.last_words() == LastWords("all is well")


@pytest.mark.parametrize(
    "names, cores, shares",
    [
        ("ab", (0, 1), {"a": (0,), "b": (1,)}),
        ("ab", (4, 2, 3, 7, 6), {"a": (2, 3, 4), "b": (6, 7)}),
        ("abc", (0, 1), {"a": (0,), "b": (1,), "c": (0,)}),
        ("a", (0, 1, 2), {"a": (0, 1, 2)}),
        ("", (0, 1), {}),
    ],
)
def test_cores_are_dealt_out_evenly_and_nobody_gets_none(names, cores, shares):
    assert deal_cores(list(names), cores) == shares


def test_processes_can_be_told_apart_by_their_arguments():
    server = serve_role(Path("runs/q/spec.resolved.yaml"), Path("runs/q")).argv
    worker = work_role(
        Path("runs/q/spec.resolved.yaml"), Path("runs/q"), "left", url="http://h:1", cores=(0, 1)
    ).argv
    assert "serve" in server and "runs/q" in server and "--with-parent" in server
    assert "work" in worker and "runs/q" in worker and "--with-parent" in worker
    assert worker[worker.index("--cores") + 1] == "0,1"


@pytest.mark.parametrize("region, name", [("left", "left"), ("server", "server.region")])
def test_no_region_shares_its_log_with_the_server(region, name):
    assert work_role(Path("s"), Path("f"), region, url="u", cores=()).name == name
