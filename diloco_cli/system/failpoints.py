"""Places where a test may let a process die, stall or fail; nothing happens there otherwise.

`reach(NAME)` stands after every step between the first byte of a contribution and the
version that contains it. Unarmed it costs one look at an empty table. `arm` is called with
`NAME=ACTION` by whoever starts the process (`diloco serve --failpoint`, `diloco work
--failpoint`, hidden), never from the environment:

    kill          SIGKILL to this very process, as the kernel would do it
    stall:2.5     a slow disk
    error:EIO     what a system call would raise; any name of `errno`

`NAME=ACTION@3` acts at the third time, and from then on.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass

POINTS = {
    "draft.written": "bytes of an upload are in its draft",
    "draft.flushed": "the whole payload is on the disk, under its draft's name",
    "draft.renamed": "the payload has its name, which a power cut may still take back",
    "draft.kept": "the payload is durable, no record speaks of it",
    "journal.appended": "a record has its place, in memory",
    "journal.written": "records are in the page cache",
    "journal.flushed": "records are durable, nobody was told",
    "reply.ready": "a contribution is accepted for good, its sender not told",
    "amendment.recorded": "an amendment has its place, in memory, and is in force",
    "round.closed": "a round has its members",
    "merge.done": "the next version exists in memory",
    "version.written": "a file of the version is written",
    "version.flushed": "a file of the version is on the disk, under its draft's name",
    "version.renamed": "a file of the version has its name",
    "version.kept": "the version is durable, no record speaks of it",
    "version.recorded": "the version's record has its place, in memory",
    "version.published": "the version is on record and visible",
    "members.filed": "one merged payload is filed with its version",
    "versions.pruned": "one file of an old version is gone",
    "snapshot.recorded": "the state is a record of the journal, in memory",
    "compact.written": "the short journal is written",
    "compact.flushed": "the short journal is on the disk, under its draft's name",
    "compact.renamed": "the short journal has its name",
    "compact.kept": "the short journal is durable",
    "start.made": "a start has made one version again that was not stored",
    "start.replayed": "a start has read the journal and the newest versions",
    "start.swept": "a start has removed what no record speaks of",
}
"""Every place in the server, and what is true there."""

REGION_POINTS = {
    "terms.heard": "an agent has newer terms on its disk, its trainer works under older ones",
    "realign.stopped": "the run was rebuilt; the trainer of the old one has left",
    "realign.named": "the folder is of the rebuilt run, its weights and checkpoint of the old one",
    "realign.fetched": "the weights are those of the rebuilt run, the checkpoint is not",
    "realign.stood": "a trainer stands on the rebuilt run, in memory",
    "realign.saved": "a checkpoint of the rebuilt run is durable, nothing is posted",
    "hosts.met": "a follower of every host is there, their devices are not one yet",
    "order.sent": "the followers know of an inner step that the lead has not begun",
    "held.sent": "the followers know of a frame that the lead has not begun",
    "adopt.sent": "the followers know of an adoption that the lead has not begun",
    "snapshot.sent": "the followers know of a snapshot that the lead has not begun",
    "save.sent": "the followers know of a sharded checkpoint that the lead has not begun",
    "vector.kept": "every host has its share of a vector, nobody uses it yet",
    "follower.joined": "a follower's devices are part of the mesh",
    "order.heard": "a follower has heard an order and not obeyed",
}
"""Every place in a region's agent, in its trainer and in a follower; the last two are those of
several hosts only."""


@dataclass(slots=True)
class _Trap:
    action: str
    left: int


_armed: dict[str, _Trap] = {}


def arm(orders: str) -> None:
    """Sets traps: `NAME=ACTION[@COUNT]`, several of them with commas between."""
    for order in filter(None, orders.split(",")):
        name, _, rest = order.partition("=")
        action, _, count = rest.partition("@")
        kind, _, detail = action.partition(":")
        known = {"kill": detail == "", "stall": bool(detail), "error": hasattr(errno, detail)}
        points = {**POINTS, **REGION_POINTS}
        if name not in points or not known.get(kind):
            raise ValueError(f"{order!r} is no failpoint; they are {', '.join(points)}")
        _armed[name] = _Trap(action, int(count or 1))


def disarm() -> None:
    """Takes all traps away."""
    _armed.clear()


def reach(name: str) -> None:
    """Does what was ordered for this place, which is nearly always nothing."""
    if _armed and (trap := _armed.get(name)):
        trap.left -= 1
        if trap.left <= 0:
            _act(trap.action)


def _act(action: str) -> None:
    kind, _, detail = action.partition(":")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)  # Never ends; the signal is on its way.
    elif kind == "stall":
        time.sleep(float(detail))
    else:
        number = getattr(errno, detail)
        raise OSError(number, os.strerror(number))
