"""Every kind of fault, in one table: spec, simulator, chaos runs and baselines read it.

A new kind is a name in `Kind`, a row in `FAULT_KINDS`, a handler in `sim/simulator.py` and one in
`chaos/inflict.py`; a test fails while any of them is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill-trainer",
    "kill-agent",
    "kill-region",
    "kill-server",
    "pause",
    "slow",
    "leave",
    "cut",
    "narrow",
    "reset",
]


@dataclass(frozen=True, slots=True)
class FaultKind:
    strikes: Literal["trainer", "agent", "region", "server", "pace", "link"]
    duration: Literal["required", "optional", "refused"]
    """required: it ends by itself; refused: over at once, a supervisor restarts what it hit;
    optional: a supervisor restarts what it hit, no sooner than that."""
    meaning: str
    kills_trainer: bool = False
    """A new trainer has to start before the region makes its next step."""
    key: Literal["", "factor", "link"] = ""
    """The key of the fault that only this kind has, and needs."""


FAULT_KINDS: Mapping[Kind, FaultKind] = {
    "kill-trainer": FaultKind(
        "trainer",
        "refused",
        "the training process dies; its agent keeps the lease and restarts it",
        kills_trainer=True,
    ),
    "kill-agent": FaultKind("agent", "refused", "the agent dies; its supervisor restarts it"),
    "kill-region": FaultKind(
        "region", "optional", "the whole host dies; the lease lapses", kills_trainer=True
    ),
    "kill-server": FaultKind("server", "optional", "the server dies; regions train on"),
    "pause": FaultKind("region", "required", "the region stands still and forgets nothing"),
    "slow": FaultKind("pace", "required", "inner steps take `factor` times as long", key="factor"),
    "leave": FaultKind("region", "required", "the region leaves the run, and joins again"),
    "cut": FaultKind("link", "required", "nothing passes between the region and the server"),
    "narrow": FaultKind("link", "required", "the region's link becomes `link`", key="link"),
    "reset": FaultKind("link", "refused", "every connection of the region breaks"),
}

ON_LINKS = tuple(kind for kind, row in FAULT_KINDS.items() if row.strikes == "link")
"""Kinds that need an emulated link between the region and the server."""

KILLS = tuple(kind for kind, row in FAULT_KINDS.items() if row.kills_trainer)
