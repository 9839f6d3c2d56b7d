from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diloco_cli.system.locks import Busy, FileLock

HOLD = """
import sys
from pathlib import Path
from diloco_cli.system.locks import FileLock
with FileLock(Path(sys.argv[1])).held():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_a_second_holder_is_told_the_pid_of_the_first(path):
    with FileLock(path).held():
        assert FileLock(path).holder() == str(os.getpid())
        with pytest.raises(Busy) as busy:
            FileLock(path).acquire()
    assert busy.value.pid == str(os.getpid()) and busy.value.path == path
    assert FileLock(path).is_free() and path.exists()


def test_the_kernel_releases_the_lock_of_a_killed_process(path):
    argv = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"held\n"
        assert FileLock(path).holder() == str(child.pid)
        child.kill()
        child.wait()
    assert FileLock(path).is_free()


def test_a_lock_without_a_number_in_it_is_held_by_an_unknown_process(path):
    with FileLock(path).held():
        path.write_text("")
        assert FileLock(path).holder() == "unknown" and not FileLock(path).is_free()


@pytest.mark.parametrize("wait", [60.0, float("inf")])
def test_one_that_waits_gets_the_lock_once_it_is_released(path, wait):
    first, second = FileLock(path), FileLock(path)
    first.acquire()
    threading.Timer(0.05, first.release).start()
    second.acquire(wait=wait)
    assert not FileLock(path).is_free()
    second.release()
    second.release()
    assert FileLock(path).is_free()


def test_a_file_that_cannot_be_opened_is_an_error_of_the_system(tmp_path):
    with pytest.raises(IsADirectoryError):
        FileLock(tmp_path).acquire()
    assert FileLock(tmp_path / "no" / "lock").is_free()


def test_those_who_only_look_at_a_free_lock_do_not_see_each_other(path):
    """Otherwise a process that was long gone is taken for the holder, and its pid may be killed."""
    path.write_text("4242\n")
    seen: list[str | None] = []

    def look() -> None:
        seen.extend(FileLock(path).holder() for _ in range(2000))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {None}
