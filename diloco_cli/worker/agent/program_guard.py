"""A process that ends a training program which its worker left behind.

However a worker dies, the kernel closes the pipe on our standard input. A program that has joined
the region by then goes on, as a trainer of ours would (`trainer/parent_watch.py`), and is here
looked at only for what it leaves. One that has not joined knows no worker and would never end, and
the next worker starts another beside it.

    pipe open ──▶ closed ──▶ nobody has joined ─────────────────────────────╮
                          ──▶ somebody has ──▶ has left ──▶ program ended ──┴─▶ end the group

We lead the program's process group, so that all of it is in reach and its number stays its own. A
program that leads another one, or has started one that does, is known by its handle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from diloco_cli.system.locks import FileLock
from diloco_cli.system.process_handle import descendants, has_ended, kill_group_of, open_process
from diloco_cli.system.wakeup import LAST_MOMENT

LOOK_SECONDS = 0.5


def argv(trainer_lock: Path) -> list[str]:
    """The command that starts a guard; its standard input is the pipe, and hears the program's pid.

    Whoever has joined holds the lock.
    """
    return [sys.executable, "-m", __name__, str(trainer_lock)]


def guard(trainer_lock: FileLock) -> None:
    # A program that signals its whole group does not mean us.
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    program, handle = 0, None
    while words := os.read(0, 64):
        program = int(words)
        handle = open_process(program)
    joined = False
    while _is_joined(trainer_lock):
        joined = True
        time.sleep(LOOK_SECONDS)
    deadline = time.monotonic() + LAST_MOMENT
    while joined and _is_here(handle, program) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    if handle is not None and not has_ended(handle):
        for each in [program, *descendants(program)]:
            kill_group_of(each)
    os.killpg(0, signal.SIGKILL)


def _is_joined(trainer_lock: FileLock) -> bool:
    """Whether whoever took the lock is there: what it has forked holds the lock when it is not."""
    holder = trainer_lock.holder()
    if holder is None or _is_there(holder):
        return holder is not None
    # Whoever has just taken it may be about to write its number.
    time.sleep(LOOK_SECONDS)
    return trainer_lock.holder() not in (None, holder)


def _is_there(pid: str) -> bool:
    """Whether a process of that number is there, or nobody can say."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        pass
    return True


def _is_here(handle: int | None, pid: int) -> bool:
    """Whether the program is there; without a handle, whether its pid is one of our group's."""
    if handle is not None:
        return not has_ended(handle)
    with contextlib.suppress(OSError):
        return pid > 0 and os.getpgid(pid) == os.getpgrp()
    return False


if __name__ == "__main__":
    guard(FileLock(Path(sys.argv[1])))
