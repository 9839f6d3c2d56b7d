"""A handle of a process, which stays with it when its pid is given to another."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path


def open_process(pid: int) -> int | None:
    """A handle of a running process, to be closed; None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None


def signal_process(handle: int | None, pid: int, number: signal.Signals) -> None:
    """Sends a signal; without a handle to whoever has the pid."""
    with contextlib.suppress(OSError):
        if handle is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(handle, number)


def has_ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], 0)[0])


def descendants(pid: int) -> list[int]:
    """Those that a process has started, and those that they have; none without /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            # The name may hold anything, a bracket too; state and parent come after it.
            _, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
            children.setdefault(int(rest.split()[1]), []).append(int(folder.name))
    found = list(children.get(pid, []))
    for each in found:
        found.extend(children.get(each, []))
    return found


def kill_group_of(pid: int) -> None:
    """Kills a process group that this process leads, if it leads one."""
    with contextlib.suppress(OSError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
