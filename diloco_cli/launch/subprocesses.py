"""Starts processes on this machine and lets none outlive its parent.

A child gets its own session (a Ctrl-C in the terminal reaches only us), a log file, and
a pipe on its standard input that carries nothing: when we die, however we die, the
kernel closes the pipe and the child, started with `--with-parent`, stops by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ERROR_LINES = 12
TAIL_BYTES = 64_000


@dataclass(frozen=True)
class Role:
    """One process of a run: what it is called and how it is started."""

    name: str
    argv: tuple[str, ...]


class Handle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int: ...
    def exit_code(self) -> int | None:
        """Says how it ended, negative for a signal; None while it runs."""
        ...

    def ask(self) -> None:
        """Asks it to stop by itself."""
        ...

    def kill(self) -> None:
        """Ends it and whatever it started, at once."""
        ...

    def last_words(self) -> str:
        """Quotes the reason it gave, from its log."""
        ...


class Launcher(Protocol):
    def start(self, role: Role) -> Handle: ...
    def stop(
        self, handles: Sequence[Handle], *, grace: float, hurry: Callable[[], bool] = ...
    ) -> None: ...


@dataclass(frozen=True)
class LocalLauncher:
    """Subprocesses of this one, with their logs in one folder."""

    logs: Path

    def start(self, role: Role) -> LocalProcess:
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{role.name}.log"
        with open(log, "ab") as output:
            began = output.tell()
            child = subprocess.Popen(
                role.argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        return LocalProcess(child, log, began)

    def stop(
        self,
        handles: Sequence[Handle],
        *,
        grace: float,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """Asks all at once, waits, and kills those that have not heard; at once in a hurry."""
        for handle in handles:
            handle.ask()
        deadline = time.monotonic() + grace
        while any(handle.exit_code() is None for handle in handles):
            if time.monotonic() >= deadline or hurry():
                break
            time.sleep(0.05)
        # Also those that ended: something they started may be left in their session.
        for handle in handles:
            handle.kill()


class LocalProcess:
    """One child and the part of its log that it wrote itself."""

    def __init__(self, child: subprocess.Popen[bytes], log: Path, began: int) -> None:
        self._child = child
        self._log = log
        self._began = began

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_code(self) -> int | None:
        code = self._child.poll()
        if code is not None:
            self._hang_up()
        return code

    def ask(self) -> None:
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it any other signal."""
        if self._child.poll() is None:
            self._child.send_signal(number)

    def kill(self) -> None:
        # The child leads its own process group, so this reaches its children too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._hang_up()

    def last_words(self) -> str:
        return last_error(self._log, since=self._began)

    def _hang_up(self) -> None:
        if self._child.stdin and not self._child.stdin.closed:
            self._child.stdin.close()


def last_error(log: Path, *, since: int = 0) -> str:
    """Quotes the last `error:` of a log with its hint; else its last line; else nothing."""
    try:
        with open(log, "rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    starts = [n for n, line in enumerate(lines) if line.startswith("error: ")]
    if starts:
        quoted = lines[starts[-1] : starts[-1] + ERROR_LINES]
        hints = [n for n, line in enumerate(quoted) if line.startswith("hint: ")]
        quoted = quoted[: hints[0] + 1] if hints else quoted
        return "\n".join(quoted).removeprefix("error: ").strip()
    spoken = [line for line in lines if line.strip()]
    return spoken[-1].strip() if spoken else ""


def deal_cores(names: Sequence[str], cores: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """Deals the cores out: neighbours stay together, nobody gets none, shares differ by one."""
    deck = sorted(cores)
    if len(names) > len(deck):
        return {name: (deck[n % len(deck)],) for n, name in enumerate(names)}
    small, more = divmod(len(deck), len(names)) if names else (0, 0)
    shares: dict[str, tuple[int, ...]] = {}
    at = 0
    for n, name in enumerate(names):
        size = small + (n < more)
        shares[name] = tuple(deck[at : at + size])
        at += size
    return shares


def my_cores() -> tuple[int, ...]:
    """Lists the cores this process may use."""
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def serve_role(spec_file: Path, folder: Path) -> Role:
    argv = (*_ourselves(), "serve", str(spec_file), "--dir", str(folder), "--with-parent")
    return Role("server", argv)


def work_role(
    spec_file: Path, folder: Path, region: str, *, url: str, cores: Sequence[int]
) -> Role:
    options = {"--region": region, "--dir": str(folder), "--server": url}
    if cores:
        options["--cores"] = ",".join(map(str, cores))
    # A region may be called what a log is called already.
    name = f"{region}.region" if region in ("server", "run") else region
    return Role(name, (*_ourselves(), "work", str(spec_file), *_flat(options), "--with-parent"))


def _ourselves() -> tuple[str, ...]:
    return (sys.executable, "-m", "diloco_cli")


def _flat(options: Mapping[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]
