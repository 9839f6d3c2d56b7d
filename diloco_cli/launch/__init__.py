"""Starting the processes of a run and keeping them running: a `Role` comes in, a `Handle` goes out.

The protocols are here. A launcher for another kind of machine is one more module beside
subprocesses.py; nothing else knows where a process runs. Start with supervise.py.

    cores.py         which cores there are, and a share of them for each region
    ports.py         which ports of this machine are free
    roles.py         the processes of a run: what each is called and how it is started
    subprocesses.py  the launcher of this machine: subprocesses that never outlive their parent
    supervise.py     keeps a process running, and knows when to stop trying
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diloco_cli.system.process_end import LastWords


@dataclass(frozen=True)
class Role:
    """One process of a run: what it is called and how it is started."""

    name: str
    argv: tuple[str, ...]
    address: Path | None = None
    """The file in which it says where it listens, if it does."""


class Handle(Protocol):
    """A started process, wherever it runs."""

    def exit_code(self) -> int | None:
        """Says how it ended, negative for a signal; None while it runs."""
        ...

    def url(self) -> str | None:
        """Says where it listens; None until it does."""
        ...

    def ask(self) -> None:
        """Asks it to stop by itself."""
        ...

    def kill(self) -> None:
        """Ends it and everything it started, at once."""
        ...

    def last_words(self) -> LastWords:
        """Quotes the reason it gave for its end, from its log."""
        ...


class Launcher(Protocol):
    def start(self, role: Role) -> Handle: ...
    def stop(
        self, handles: Sequence[Handle], *, grace: float, hurry: Callable[[], bool] = ...
    ) -> None:
        """Asks all to stop, and kills those that still run after the grace or in a hurry."""
        ...
