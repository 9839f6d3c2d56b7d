"""A real server, four real clients, and the questions asked after every death of the server.

What the clients wrote down is compared with what is on the server's disk, before the next
server is started on it: nothing acknowledged is lost, nothing is merged twice, and the
weights made again from the journal have the digests that were recorded.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from diloco_cli.core.journal_records import FrameDecided, MemberDropped, decode_all
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.recovery.verify import Replay, replay
from diloco_cli.server.store.journal import read_journal
from tests import ROOT, SMALL_SERVER
from tests.server.harness import Region, make_settings, make_spec

__all__ = ["DEADLINE", "Broken", "Cold", "Nursery", "Region", "Stage"]

REGIONS = ["iowa", "oslo", "paris", "tokyo"]
CHANGES: dict[str, Any] = {
    "names": REGIONS,
    "grace": {"kind": "fixed", "seconds": 0.02},
    "budget": {"tokens": 10**12},
    "server": {
        "listen": "127.0.0.1:0",
        "lease": 30.0,
        # So short that it is compacted again and again.
        "store": {"kind": "folder", "journal": 1 << 16, "history": 16, "replay": 16, "reserve": 0},
    },
}
DEADLINE = 60.0


class Broken(Exception):
    """A promise did not hold."""


@dataclass
class Told:
    """What one client was told, in order, fragment by fragment."""

    sent: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    fresh: list[float] = field(default_factory=list)
    """When a new frame of it was accepted."""
    place: int = 0


class Cold:
    """A server that was started like any program."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        under = changes.pop("under", ())  # Another program that starts it in its own place.
        with open(folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [*under, sys.executable, *SMALL_SERVER, str(folder), json.dumps(changes)],
                stderr=log,
                cwd=ROOT,
            )
        self.pid = self._process.pid

    def code(self) -> int | None:
        return self._process.poll()


class Nursery:
    """See `fork_server.py`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def server(self, folder: Path, changes: dict[str, Any]) -> Forked:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.verify.durability.fork_server"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin and self._process.stdout
        order = {"folder": str(folder), "changes": changes}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()), self._process.stdout)

    def close(self) -> None:
        if self._process:
            assert self._process.stdin and self._process.stdout
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


class Forked:
    """A server that was forked by the nursery, which says when it has ended."""

    def __init__(self, pid: int, said: IO[str]) -> None:
        self.pid, self._said, self._code = pid, said, None

    def code(self) -> int | None:
        if self._code is None and select.select([self._said], [], [], 0)[0]:
            self._code = int(self._said.readline())
        return self._code


class Stage:
    """A run folder, its clients, and one server after another."""

    def __init__(self, folder: Path, *, tolerated: tuple[str, ...] = (), **changes: Any) -> None:
        """`tolerated` is what clients may say without breaking a promise."""
        self.folder, self.changes, self.tolerated = folder, {**CHANGES, **changes}, tolerated
        self.settings = make_settings(make_spec(**self.changes))
        self.told = {name: Told() for name in REGIONS}
        self.clients: list[subprocess.Popen[bytes]] = []
        self.nursery, self.second = Nursery(), Nursery()
        """For the run's servers, and for one beside them."""
        self.server: Cold | Forked | None = None
        self.covered: dict[int, int] = {}
        self.made_again = 0
        self.unstored = 0
        """Versions that the next start must make again, when last checked."""
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def accepted(self) -> int:
        self.listen()
        return sum(len(told.acknowledged) for told in self.told.values())

    def start(self, *, cold: bool = False, **extra: Any) -> float:
        """Starts the next server; says when that was. A cold one loads everything itself."""
        self.server = None
        began = time.monotonic()
        changes = {**self.changes, **extra}
        self.server = (Cold if cold else self.nursery.server)(self.folder, changes)
        return began

    def url(self) -> str:
        """Waits until the server listens."""

        def listens() -> str:
            assert self.server and self.server.code() is None, self.last_words()
            with suppress(OSError, ValueError):
                address = json.loads((self.folder / "server" / "address.json").read_bytes())
                return address["url"] if address["pid"] == self.server.pid else ""
            return ""

        return self.wait(listens)

    def add_clients(self) -> None:
        url, changes = self.url(), json.dumps(self.changes)
        for name in REGIONS:
            log = str(self.folder / f"{name}.told")
            with open(self.folder / "log", "ab") as err:
                arguments = [
                    sys.executable,
                    "-m",
                    "tests.verify.durability.clients",
                    url,
                    name,
                    log,
                    changes,
                ]
                self.clients.append(subprocess.Popen(arguments, stderr=err, cwd=ROOT))

    def kill(self) -> None:
        assert self.server
        os.kill(self.server.pid, signal.SIGKILL)
        self.died()

    def died(self, seconds: float = DEADLINE) -> int:
        """Waits until the server is gone; gives its exit code."""
        self.wait(lambda: self.server is not None and self.server.code() is not None, seconds)
        code = self.server.code() if self.server else None
        assert code is not None
        return code

    def wait(self, ready: Callable[[], Any], seconds: float = DEADLINE) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := ready()):
            if time.monotonic() > deadline:
                raise Broken(f"it did not happen within {seconds:.0f} s\n{self.last_words()}")
            time.sleep(0.005)  # Other processes cannot wake us.
        return found

    def until_accepted(self, more: int) -> None:
        enough = self.accepted + more
        self.wait(lambda: self.accepted >= enough)

    def until_published(self) -> None:
        """Waits for a version of every fragment: what was accepted may still wait for its grace."""
        url = self.url()

        def published() -> bool:
            with suppress(httpx.HTTPError):
                fragments = httpx.get(f"{url}/v1/status", timeout=20).json()["fragments"]
                return all(fragment["version"] for fragment in fragments)
            return False

        self.wait(published)

    def listen(self) -> None:
        """Reads what the clients wrote since."""
        for name, told in self.told.items():
            path = self.folder / f"{name}.told"
            if not path.exists():
                continue
            with open(path, "rb") as file:
                file.seek(told.place)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            told.place += whole
            for line in data[:whole].splitlines():
                self._hear(name, told, json.loads(line))

    def _hear(self, name: str, told: Told, said: dict[str, Any]) -> None:
        if said["what"] == "sent":
            told.sent.setdefault(said["fragment"], []).append((said["digest"], said["tokens"]))
        elif said["what"] == "acknowledged":
            told.acknowledged.add(said["digest"])
            if said["fresh"]:
                told.fresh.append(said["at"])
        elif said["what"] not in self.tolerated:
            raise Broken(f"{name}: {said['what']}: {said['why']}")

    def first_accepted(self, after: float) -> float | None:
        """When the first new frame was accepted after a moment."""
        times = [at for told in self.told.values() for at in told.fresh if at > after]
        return min(times, default=None)

    def check(self, server: Path | None = None) -> Replay:
        """Compares the disk of the dead server with what the clients were told."""
        self.listen()
        folder = server or self.folder / "server"
        ledger = Ledger.empty(len(self.settings.sizes))
        content = read_journal(folder / "journal")
        decided: set[str] = set()
        for number, record in decode_all(content.records, base=content.base):
            if isinstance(record, FrameDecided):
                digest = record.receipt.digest
                if digest in decided:
                    raise Broken(f"record {number} decides on {digest[:12]} a second time")
                decided.add(digest)
            elif isinstance(record, MemberDropped):
                raise Broken(f"record {number}: {record}")
            ledger.apply(number, record)
        self.unstored = sum(len(slot.unstored) for slot in ledger.slots)
        for name, told in self.told.items():
            for fragment, frames in told.sent.items():
                self._check_one(ledger, name, told, fragment, frames)
        found = replay(self.settings, folder)
        for line in found.lines:
            self.made_again += max(
                0, line.version - max(line.start, self.covered.get(line.fragment, 0))
            )
            self.covered[line.fragment] = line.version
        return found

    def _check_one(
        self,
        ledger: Ledger,
        name: str,
        told: Told,
        fragment: int,
        frames: list[tuple[str, float]],
    ) -> None:
        slot = ledger.slots[fragment]
        digests = [digest for digest, _ in frames]
        merged = slot.merged.get(name, "")
        done = digests.index(merged) + 1 if merged else 0
        applied, expected = slot.applied.get(name, 0.0), sum(t for _, t in frames[:done])
        if applied != expected:
            raise Broken(f"{name} {fragment}: {applied} tokens applied, {expected} sent: doubled")
        waiting = slot.waiting.get(name) or slot.closing.get(name)
        for digest in digests[done:]:
            if digest in told.acknowledged and (waiting is None or waiting.digest != digest):
                raise Broken(f"{name} {fragment}: {digest[:12]} was acknowledged and is lost")

    def last_words(self) -> str:
        with suppress(OSError):
            return (self.folder / "log").read_text(errors="replace")[-3000:]
        return ""

    def close(self) -> None:
        for client in self.clients:
            client.kill()
            client.wait()
        if self.server and self.server.code() is None:
            self.kill()
        self.nursery.close()
        self.second.close()
