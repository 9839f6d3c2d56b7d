"""What is a link, and when does a byte come out of it?

    sender ──▶ queue ──▶ line, `rate` bits a second ──▶ `delay` seconds ──▶ receiver

Each direction is a lane of its own, first in, first out, shared by all connections. The
queue is bounded: a lane whose line is busy for longer than `queue` seconds takes nothing
more until it has worked some of that off, so senders feel the link, not our memory.

While a link is out its clock stands still: what is on the way stays on the way and goes
on when the outage ends, and the line never carries more than its rate to catch up.

Bytes are those of the connections; headers of packets are not counted. Time is an
argument, in seconds since the link was made. The live emulator and a simulator ask the
same lanes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_cli.errors import SpecError
from diloco_cli.spec.quantities import DELAY, LINKS, RATE, SIZE

Seconds = float

UNSHAPED = 16 << 20
"""Bytes a connection may have on the way where the rate sets no limit."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two places; both directions are alike."""

    rate: float = math.inf
    """Bits a second, each way."""

    delay: Seconds = 0.0
    """One way; a round trip takes twice as long."""

    queue: Seconds = 0.1
    """Work the line may be behind with before it takes no more."""

    window: int | None = None
    """Bytes one connection may have sent and not yet seen confirmed; None: as many as fit."""

    reset_every: Seconds | None = None
    """How often every connection is broken."""

    outages: tuple[tuple[Seconds, Seconds], ...] = field(default=())
    """From when to when nothing passes; in order, apart from each other."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate is {self.rate:g} bit/s; nothing would ever arrive")
        if not 0 <= self.delay < math.inf or not 0 <= self.queue < math.inf:
            raise ValueError(f"delay {self.delay:g} s and queue {self.queue:g} s must be 0 or more")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window} bytes; nothing could be sent")
        if self.reset_every is not None and not self.reset_every > 0:
            raise ValueError(f"reset_every is {self.reset_every:g} s; no connection would live")
        edges = [edge for outage in self.outages for edge in outage]
        if any(later <= earlier for earlier, later in itertools.pairwise(edges)):
            raise ValueError(f"outages {self.outages} overlap, touch or end before they start")

    @property
    def round_trip(self) -> Seconds:
        return 2 * self.delay

    @property
    def capacity(self) -> int:
        """Bytes one connection may have on the way: its window, or what fills line and queue."""
        if self.window is not None:
            return self.window
        if math.isinf(self.rate):
            return UNSHAPED
        return max(1, round(self.rate / 8 * (self.round_trip + self.queue)))

    def after(self, start: Seconds, seconds: Seconds) -> Seconds:
        """Says when `seconds` of working time are over, from `start` on."""
        now = start
        for begin, end in self.outages:
            if end <= now:
                continue
            if now + seconds <= begin:
                break
            seconds -= max(0.0, begin - now)
            now = end
        return now + seconds

    def next_reset(self, *, now: Seconds) -> Seconds | None:
        """Says when connections break next, after `now`; None where they never do."""
        if self.reset_every is None:
            return None
        count = math.floor(now / self.reset_every) + 1
        # A quotient a hair too small would answer `now` itself, and a loop over resets would stand.
        return max(count * self.reset_every, math.nextafter(now, math.inf))

    def __str__(self) -> str:
        """The words `parse_link` reads."""
        words = [_in_units(self.rate, RATE.units), _in_units(self.round_trip, DELAY.units)]
        if self.queue != Link.__dataclass_fields__["queue"].default:
            words.append(f"queue={_in_units(self.queue, DELAY.units)}")
        if self.window is not None:
            words.append(f"window={_in_units(self.window, SIZE.units)}")
        if self.reset_every is not None:
            words.append(f"reset={_in_units(self.reset_every, DELAY.units)}")
        for begin, end in self.outages:
            words.append(f"out={_in_units(begin, DELAY.units)}..{_in_units(end, DELAY.units)}")
        return "/".join(words)


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction of a link, and the work it has taken on."""

    link: Link
    free_at: Seconds = 0.0
    """When the line has sent all it was given."""

    last: Seconds = 0.0
    """When the newest bytes come out; nothing overtakes them, even on a link that got faster."""

    def send(self, size: int, *, now: Seconds) -> Lane:
        """Puts bytes behind all the others; they come out at the new lane's `last`."""
        sent = self.link.after(max(now, self.free_at), size * 8 / self.link.rate)
        return Lane(self.link, sent, max(self.last, self.link.after(sent, self.link.delay)))

    def opens(self) -> Seconds:
        """Says from when on the queue has room."""
        return self.free_at - self.link.queue

    def over(self, link: Link) -> Lane:
        """The same work on another link, from the next bytes on."""
        return replace(self, link=link)


UNLIMITED = "unlimited"


def parse_link(words: str) -> Link:
    """Reads a rate, a round trip and what else there is to say: `10Mbit/50ms/reset=2s`.

    The second word is a round trip, since that is what `ping` prints; half of it is spent
    each way. Further words: `queue=200ms`, `window=4MB`, `reset=2s`, `out=10s..20s`.
    """
    first, *rest = re.sub(r"(bit|bps)/s\b", r"\1", words.strip()).split("/")
    link: dict[str, Any] = {"rate": parse_rate(first)}
    outages: list[tuple[Seconds, Seconds]] = []
    for position, word in enumerate(rest):
        name, given, value = (part.strip() for part in word.partition("="))
        if not given and position == 0:
            link["delay"] = parse_seconds(name) / 2
        elif name == "queue":
            link["queue"] = parse_seconds(value)
        elif name == "window":
            link["window"] = round(SIZE.read(value))
        elif name == "reset":
            link["reset_every"] = parse_seconds(value)
        elif name == "out":
            begin, _, end = value.partition("..")
            outages.append((parse_seconds(begin), parse_seconds(end)))
        else:
            raise SpecError(f"The link {words!r} has a word nobody knows: {word!r}.", hint=LINKS)
    try:
        return Link(**link, outages=tuple(outages))
    except ValueError as error:
        raise SpecError(f"The link {words!r} cannot be: {error}.", hint=LINKS) from None


def parse_rate(word: str) -> float:
    """Reads bits per second: `10Mbit`, `1.5Gbit/s`, `100Mbps`, `unlimited`."""
    word = re.sub(r"(?:bit/s|bps)$", "bit", word.strip())
    return math.inf if word == UNLIMITED else RATE.read(word)


def parse_seconds(word: str) -> Seconds:
    """Reads a time: `50ms`, `2s`, `200us`."""
    return DELAY.read(word)


def _in_units(value: float, units: Mapping[str, float]) -> str:
    if math.isinf(value):
        return UNLIMITED
    fitting = [unit for unit, size in units.items() if value >= size or not value]
    unit = fitting[-1] if fitting else next(iter(units))
    return f"{value / units[unit]:.12g}{unit}"
