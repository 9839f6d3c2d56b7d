"""Host 0's agent: what its trainer is told of the other hosts, and they at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from diloco_cli.errors import DilocoError
from diloco_cli.spec.schema import RunSpec
from diloco_cli.worker.handover import trainer_digest
from diloco_cli.worker.hosts.connection import HostConnection
from diloco_cli.worker.hosts.listener import HostHello, HostListener, ending
from diloco_cli.worker.hosts.secret import hand_down
from diloco_cli.worker.hosts.which_host import HostPlace

log = logging.getLogger(__name__)

MEET_SECONDS = 5.0
"""For the supervisors that still wait to hear that the run is over."""


@dataclass(frozen=True)
class FirstHost:
    """The first host of a region that has several."""

    place: HostPlace
    secret: bytes

    def options(self, spec: RunSpec, region: str) -> list[str]:
        """What the trainer is told of the others."""
        own = ["--hosts", str(self.place.hosts), "--coordinator", self.place.coordinator]
        return [*own, "--own", trainer_digest(spec, region)]

    def environment(self) -> dict[str, str]:
        return hand_down(self.secret)

    def tell_the_end(self, run: Callable[[], int], is_over: Callable[[], bool]) -> int:
        """Runs the agent, and tells the others if nothing more will come."""
        try:
            code = run()
        except DilocoError as error:
            self.dismiss(error)
            raise
        if is_over():
            self.dismiss(None)
        return code

    def dismiss(self, why: DilocoError | None) -> None:
        """Tells the supervisors of all other hosts that nothing more will come."""
        told: set[int] = set()
        done = threading.Event()

        def answer(hello: HostHello, connection: HostConnection) -> None:
            connection.send(ending(why))
            told.add(hello.host)
            if len(told) == self.place.hosts - 1:
                done.set()

        try:
            listener = HostListener(self.place, self.secret, answer, wait=MEET_SECONDS)
        except DilocoError as error:
            log.info(f"the other hosts were not told: {error.message}")
            return
        done.wait(MEET_SECONDS)
        listener.close()
