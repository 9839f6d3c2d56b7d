"""By which settings does a region's trainer work?

By the region's own file, as it was given at this start, with all amendments of the run laid over
it. So a key that no amendment names stays the region's own, and one that an amendment names is
the run's from then on. What belongs to the host (devices, credentials, rate limits) cannot be
amended and comes from the file alone.

    own file + amendments 1 … n ──▶ spec.yaml ──▶ trainer

Amendments that do not fit the region's own file are not followed: the region goes on under the
last terms that do, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diloco_cli.core.terms import overlay
from diloco_cli.spec.load import SpecErrors
from diloco_cli.spec.resolved import resolved, resolved_yaml
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.messages import Amendment, Amendments
from diloco_cli.worker.handover import trainer_digest
from diloco_cli.worker.mailbox import Mailbox

BuildSpec = Callable[[Mapping[str, Any]], RunSpec]
"""Makes a checked spec of plain data; raises SpecErrors with all that is wrong with it."""


class TrainerSettings:
    """The settings of one region's trainer, and which terms of the run they are of."""

    def __init__(self, mailbox: Mailbox, region: str, own: RunSpec, build: BuildSpec) -> None:
        self.mailbox, self.region, self._own, self._build = mailbox, region, own, build
        self.terms = 0
        self.spec = own
        self.trouble = ""
        """Why newer terms are not followed; empty if these are the newest."""

    @property
    def digest(self) -> str:
        """Changes whenever a trainer has to start anew."""
        return trainer_digest(self.spec, self.region)

    def follow(self, newest: Amendments) -> None:
        """Goes over to the newest terms that fit."""
        self.trouble = ""
        for number in range(newest.terms, 0, -1):
            try:
                self.spec = self._under(newest.amendments[:number])
            except SpecErrors as error:
                first = error.problems[0]
                self.trouble = (
                    self.trouble
                    or f"amendment {number} does not fit this region's own file: "
                    f"{first.key} {first.message}"
                )
            else:
                self.terms = number
                return
        self.spec, self.terms = self._own, 0

    def write(self) -> None:
        """Makes the settings durable for the trainer that is about to start."""
        self.mailbox.write_spec(resolved_yaml(self.spec))

    def _under(self, amendments: tuple[Amendment, ...]) -> RunSpec:
        # Whether we are in the run at all is for the server to say.
        return self._build(overlay(resolved(self._own), amendments))
