"""`diloco work` on every host of a region but the first: starts one follower a generation.

    call host 0 ──▶ its generation ──▶ start a follower ──▶ it is gone, or host 0 is ──╮
         ▲                                                                            │
         ╰──────────────────────────── end what is left of it ◀───────────────────────╯

It never imports a framework, holds nothing that would be missed, and knows nothing but where
host 0 is. Once host 0 was there it may be away for any time; it says when the run is over.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_cli.errors import DilocoError, LinkError, SpecError, StoreError, WireError
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system import logs
from diloco_cli.system.process_end import exit_in_words
from diloco_cli.system.wakeup import (
    LAST_MOMENT,
    Wakeup,
    exit_at_once,
    stop_service_on_signals,
    wake_on_input,
)
from diloco_cli.worker.agent.trainer_process import TrainerProcess
from diloco_cli.worker.hosts.connection import ConnectionClosed, HostConnection, connect
from diloco_cli.worker.hosts.listener import HostHello
from diloco_cli.worker.hosts.secret import hand_down
from diloco_cli.worker.hosts.which_host import HostPlace

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
LOOK_SECONDS = 0.3
END_SECONDS = 10.0
"""For a follower that was told to end, and for a lead whose follower is gone."""
ERRORS: dict[int, type[DilocoError]] = {2: SpecError, 3: WireError, 4: LinkError, 5: StoreError}


def supervise(
    spec: RunSpec,
    region: str,
    folder: Path,
    place: HostPlace,
    secret: bytes,
    *,
    wait: float,
    cores: Sequence[int] | None = None,
    with_parent: bool = False,
    failpoint: str = "",
) -> int:
    """Keeps this host's follower running until host 0 says that the run is over.

    `wait` is how long a host 0 that does not answer is waited for at the start.
    """
    wakeup = Wakeup()
    log_file = folder / "logs" / f"{region}.host-{place.host}.follower.log"
    supervisor = FollowerSupervisor(spec, region, place, secret, wakeup, log_file, cores=cores)
    supervisor.failpoint = failpoint

    def at_once(number: int) -> None:
        supervisor.kill()
        exit_at_once(number)

    stop_service_on_signals(wakeup, second=at_once)
    if with_parent:
        wake_on_input(wakeup, 0, at_end="the process that started this worker is gone")
    gc.freeze()
    try:
        return supervisor.run(wait=wait)
    finally:
        supervisor.kill()


class FollowerSupervisor:
    def __init__(
        self,
        spec: RunSpec,
        region: str,
        place: HostPlace,
        secret: bytes,
        wakeup: Wakeup,
        log_file: Path,
        *,
        cores: Sequence[int] | None,
    ) -> None:
        self._place, self._secret, self._wakeup, self._log = place, secret, wakeup, log_file
        self._hello = HostHello.of("supervisor", place, spec, region)
        own = [sys.executable, "-m", "diloco_cli", "follower", spec.name, "--region", region]
        own += ["--hosts", str(place.hosts), "--host", str(place.host)]
        own += ["--coordinator", place.coordinator, "--own", self._hello.digest, *logs.options()]
        self._argv = own + (["--cores", ",".join(map(str, cores))] if cores else [])
        self.failpoint = ""
        """Set in the first follower, for tests."""
        self.follower: TrainerProcess | None = None

    def run(self, *, wait: float) -> int:
        deadline = time.monotonic() + wait
        said = ""
        while not self._wakeup.stop_reason:
            try:
                connection, message = self._call()
            except LinkError as error:
                if time.monotonic() >= deadline:
                    raise
                said = self._wait(error.message, said)
                continue
            if "over" in message:
                connection.close()
                return self._over(message)
            if "later" in message:
                connection.close()
                if time.monotonic() >= deadline:
                    raise SpecError(message["later"], hint=message["hint"])
                said = self._wait(message["later"], said)
                continue
            deadline, said = float("inf"), ""
            self._serve(connection, message["generation"])
        log.info(f"leaving: {self._wakeup.stop_reason}")
        return 0

    def _wait(self, why: str, said: str) -> str:
        if why != said:
            log.info(f"waiting for host 0: {why}")
        self._pause(LOOK_SECONDS)
        return why

    def _call(self) -> tuple[HostConnection, dict[str, Any]]:
        """Says who we are; gives what host 0 answers."""
        connection = connect(self._place.address, self._secret, seconds=CONNECT_SECONDS)
        try:
            connection.send(self._hello.record())
            return connection, connection.receive()[0]
        except LinkError:
            connection.close()
            raise

    def kill(self) -> None:
        """Ends the follower at once; may be called from a signal handler."""
        if follower := self.follower:
            follower.kill()

    def _over(self, message: dict[str, Any]) -> int:
        code = message["over"]
        if code:
            raise ERRORS.get(code, DilocoError)(message["message"], hint=message["hint"])
        log.info("leaving: host 0 says that the run is over")
        return 0

    def _serve(self, connection: HostConnection, generation: str) -> None:
        """Runs a follower of one generation until it, the lead or we are to end."""
        log.info(f"generation {generation}: starting a follower")
        gone = threading.Event()

        def listen() -> None:
            try:
                while True:
                    connection.receive()
            except (ConnectionClosed, WireError):
                gone.set()
                self._wakeup.wake()

        threading.Thread(target=listen, name="lead", daemon=True).start()
        words = [*self._argv, "--generation", generation]
        words += ["--failpoint", self.failpoint] if self.failpoint else []
        self.failpoint = ""
        follower = self.follower = TrainerProcess(
            words,
            self._log,
            on_output=lambda _: None,
            on_end=self._wakeup.wake,
            environment=hand_down(self._secret),
        )
        while follower.code is None and not gone.is_set() and not self._wakeup.stop_reason:
            follower.log.keep_small()
            self._pause(1.0)
        # Launchers tell all hosts at once to stop: the lead still needs us for what it saves.
        deadline = time.monotonic() + LAST_MOMENT
        while follower.code is None and not gone.is_set() and time.monotonic() < deadline:
            self._pause(0.2)
        if follower.code is None and gone.is_set():
            deadline = time.monotonic() + END_SECONDS
            while follower.code is None and time.monotonic() < deadline:
                self._pause(0.2)  # It has heard the same, and leaves.
        follower.kill()
        follower.wait(END_SECONDS)
        self.follower = None
        code = follower.code if follower.code is not None else 1
        if not gone.is_set() and not self._wakeup.stop_reason:
            self._tell(connection, follower, code)
            gone.wait(END_SECONDS)
        log.info(f"generation {generation} is over: {exit_in_words(code)}")
        connection.close()

    def _tell(self, connection: HostConnection, follower: TrainerProcess, code: int) -> None:
        """Says how the follower ended, so that host 0 can name the reason."""
        words = follower.last_words() if code >= 0 else None
        told = {
            "died": code,
            "message": words.message[:600] if words else exit_in_words(code),
            "hint": words.hint if words else None,
        }
        with contextlib.suppress(ConnectionClosed):
            connection.send(told)

    def _pause(self, seconds: float) -> None:
        if self._wakeup.wait(seconds):
            self._wakeup.clear()
