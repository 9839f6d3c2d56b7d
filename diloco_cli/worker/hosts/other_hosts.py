"""The other hosts of a region, around its training: they are there first, and they end with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from diloco_cli.errors import DilocoError
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.messages import TrainerProgress
from diloco_cli.worker.hosts.lead import Lead, leave
from diloco_cli.worker.hosts.listener import RegionTerms
from diloco_cli.worker.hosts.secret import inherited
from diloco_cli.worker.mailbox import Mailbox


@dataclass(frozen=True)
class OtherHosts:
    terms: RegionTerms
    mailbox: Mailbox
    wakeup: Wakeup
    tell: Callable[[str], None]

    def lead(self, begin: Callable[[Lead], int]) -> NoReturn:
        """Trains together with the other hosts, once all are there; ends this process."""
        lead = None
        try:
            lead = Lead(self.terms, inherited(), self.mailbox.folder)
            if not lead.gather(self._say, lambda: self.wakeup.stop_reason):
                leave(0)
            from diloco_cli.worker.engines.many_hosts import join_processes

            self._say("all hosts are there; starting")
            join_processes(lead.open_devices(), hosts=self.terms.place.hosts, host=0)
            code = begin(lead)
            lead.close()
        except DilocoError as error:
            leave(error.exit_code, error.message, error.hint)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:600]
            # Whatever went wrong on the devices, it most likely began on another host.
            lead.explain(why) if lead else leave(1, why)
        leave(code)

    def _say(self, why: str) -> None:
        fragments = self.terms.spec.sync.fragments
        before = self.mailbox.progress() or TrainerProgress.none(fragments)
        report = before.model_copy(update={"training": False, "why": why})
        with contextlib.suppress(OSError):
            self.mailbox.write_progress(report)
        self.tell("progress")
