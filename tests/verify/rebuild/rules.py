"""Rules that can be switched off: each one must be missed by the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    void: bool = True
    """Frames of another run are refused."""
    saved_first: bool = True
    """A checkpoint of the new run is durable before anything is posted in it."""
    own_frames: bool = True
    """What lies in the outbox of an earlier run is not sent."""
    realigned_once: bool = True
    """A checkpoint that names the new run is not realigned again."""
    earlier: bool = True
    """An earlier frame of one's own is told from a stranger's."""
    strangers: bool = True
    """Where another folder spoke for the region, what is held is given up."""


NAMES = tuple(Rules.__dataclass_fields__)


class Broken(Exception):
    """A promise is broken."""


class Died(Exception):
    """A process died; what is durable stays."""
