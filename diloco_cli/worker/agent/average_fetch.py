"""When the region that evaluates fetches the run's average of its published weights.

It comes beside every evaluation of the plain weights, as a file that the trainer takes. It is
a whole model, so the line is left to the versions for most of the time; whatever goes wrong
costs this figure and nothing else.
"""

from __future__ import annotations

import logging
import time

from diloco_cli.errors import DilocoError
from diloco_cli.net.client import Client
from diloco_cli.wire.messages import News, TrainerProgress
from diloco_cli.worker.mailbox import Mailbox

log = logging.getLogger(__name__)

REST = 10.0
"""After a download none is begun for so many times as long as it took."""
REST_AFTER_FAILURE = 5.0


class AverageFetch:
    """One region's downloads of the average."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._measured = -1
        """Outer steps of the plain weights that were the last to be measured before a download."""
        self._rest_until = 0.0
        self._trouble = ""

    def is_due(self, news: News, report: TrainerProgress | None, *, now: float) -> bool:
        """Says whether the plain weights were measured since; at the end there is no rest."""
        if report is None or report.heldout is None or not (news.evaluate and news.ema):
            return False
        rested = news.finished or now >= self._rest_until
        return rested and sum(report.heldout.versions) > self._measured

    def fetch(self, server: Client, report: TrainerProgress) -> bool:
        """Leaves the newest average in the mailbox; says whether it is there."""
        assert report.heldout is not None
        began = time.monotonic()
        try:
            server.weights(self._mailbox.average_file, ema=True)
        except DilocoError as error:
            self._rest_until = time.monotonic() + REST_AFTER_FAILURE
            if error.message != self._trouble:
                self._trouble = error.message
                log.info(f"the average of the weights is not measured: {error.message}")
            return False
        ended = time.monotonic()
        self._rest_until = ended + REST * (ended - began)
        self._measured, self._trouble = sum(report.heldout.versions), ""
        return True
