"""Operators of the model: they amend a run over the same bad network, two at once, or offline.

A request that gets no answer is sent again under its id. One that was overtaken by another
operator's is made for the newest terms and sent again, under the same id, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco_cli.core.journal_records import TermsAmended
from diloco_cli.core.terms import AmendmentRequest
from diloco_cli.spec.schema import SyncSpec
from tests.verify.model.seeded_run import Setting

if TYPE_CHECKING:
    from tests.verify.model.audit import Audit
    from tests.verify.model.server import Server
    from tests.verify.model.virtual_time import Clockwork

RETRY = 5.0
MORE = 1.4
"""Times its budget that an ended run is given."""


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """What amendments may change."""

    sync: SyncSpec
    budget: float
    lr: float = 0.4
    momentum: float = 0.9


def terms_after(setting: Setting, amendments: Sequence[TermsAmended]) -> ModelTerms:
    """The terms that amendments lead to, one after the other."""
    terms = ModelTerms(setting.sync, setting.budget)
    for amendment in amendments:
        for key, value in amendment.set.items():
            section, _, name = key.partition(".")
            if section == "sync":
                terms = replace(terms, sync=terms.sync.model_copy(update={name: value}))
            else:
                terms = replace(terms, **{"budget" if section == "budget" else name: value})
    return terms


def amended(setting: Setting) -> Setting:
    """The same run with operators who amend it, and may open it again."""
    rng = random.Random(f"reopenings {setting.seed}")
    reopenings = tuple(rng.uniform(0, 40) for _ in range(rng.choice((0, 0, 1, 2))))
    return replace(setting, wishes=_drawn_wishes(setting), reopenings=reopenings)


def _drawn_wishes(setting: Setting) -> tuple[tuple[float, dict[str, Any]], ...]:
    """Amendments of a run and when they are asked for."""
    rng = random.Random(f"amendments {setting.seed}")
    until = max(setting.quiet, 90.0)
    choices: dict[str, tuple[Any, ...]] = {
        "outer.lr": (0.1, 0.2, 0.6),
        "outer.momentum": (0.0, 0.5, 0.8),
        # Whoever is left must still make a quorum.
        "sync.quorum": tuple(range(1, setting.sync.quorum + 1)),
        "sync.every": (2, 3, 5, 8),
        "sync.overlap": (0, 2),
        "sync.adopt": ("rebase", "replace", "blend"),
        "sync.staleness": (1, 2, 3),
        "budget.tokens": tuple(setting.budget * share for share in (0.7, 1.3, 1.8)),
    }
    wishes = []
    for _ in range(rng.choice((1, 3, 6))):
        keys = rng.sample([*choices], rng.choice((1, 1, 2)))
        wishes.append((rng.uniform(3, until), {key: rng.choice(choices[key]) for key in keys}))
    return tuple(sorted(wishes, key=lambda wish: wish[0]))


class Operator:
    """Sees to it that every wish becomes an amendment, once."""

    def __init__(self, world: Clockwork, server: Server, audit: Audit) -> None:
        self.world, self.server, self.audit = world, server, audit
        self.open = 0
        """Wishes that were not answered yet."""
        self._knows = 0
        """Number of the newest terms that an operator has heard of."""
        for number, (at, changes) in enumerate(world.setting.wishes):
            self.open += 1
            request = AmendmentRequest(f"wish-{number}", set=changes)
            world.schedule(at, partial(self._ask, request))
        self.open += len(world.setting.reopenings)
        self._open_again(0)

    def _open_again(self, number: int) -> None:
        """Waits for the end of the run, then asks for more; and again at the next end."""
        server, reopenings = self.server, self.world.setting.reopenings
        if number == len(reopenings):
            return
        earlier = f"more-{number - 1}"
        if (number and earlier not in self.audit.answered) or not (server.up and server.ledger.end):
            self.world.schedule(1.0, partial(self._open_again, number))
            return
        budget = terms_after(self.world.setting, server.ledger.amendments).budget
        request = AmendmentRequest(f"more-{number}", set={"budget.tokens": MORE * budget})
        self.world.schedule(reopenings[number], partial(self._ask, request))
        self._open_again(number + 1)

    def _ask(self, request: AmendmentRequest) -> None:
        if request.id in self.audit.answered:
            return
        if not self.server.up and self.world.chance(0.3):
            # Whoever has the folder of a stopped server needs no server.
            self.server.amend_offline(request)
            self._answered(request, "done")
            return
        made_for = replace(request, after=self._knows)

        def reply(answer: str | int) -> None:
            self.world.transmit("operator", partial(self._answered, request, answer))

        def ask() -> None:
            if self.server.up:
                self.server.amend(made_for, reply)

        self.world.transmit("operator", ask)
        self.world.schedule(RETRY, partial(self._ask, request))

    def _answered(self, request: AmendmentRequest, answer: str | int) -> None:
        if isinstance(answer, int):
            self._knows = max(self._knows, answer)
        elif request.id not in self.audit.answered:
            self.audit.answered.add(request.id)
            self.open -= 1
