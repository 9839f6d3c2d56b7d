"""Tables and progress for people.

On a terminal the picture is redrawn in place; elsewhere (a file, a CI log) one plain
line is printed every ten seconds and when a state changes. Talk goes to stderr,
what was asked for goes to stdout; NO_COLOR and narrow windows are respected.
"""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diloco_cli.observe.metrics import average_in_words, seconds_left
from diloco_cli.observe.seen_run import SeenRun
from diloco_cli.observe.status import LastKnown, LossStatus, Status, Summary
from diloco_cli.observe.status_view import (
    UNAPPLIED,
    UNLIMITED,
    began_with,
    continues,
    given_up,
    goodputs_in_words,
    plain_line,
    status_view,
)
from diloco_cli.observe.units import amount, bits, bytes_, loss, percent, seconds

PLAIN_LINE_SECONDS = 10.0
STATE_SECONDS = 2.0
"""Between two plain lines, when only regions change and there are many."""
FEW_REGIONS = 8
RATE_WINDOW_SECONDS = 120.0
LINES_KEPT = 20
"""That are said again in a window of another size."""


def to_people() -> Console:
    return Console(stderr=True, highlight=False)


def to_stdout() -> Console:
    return Console(highlight=False)


def display(view: RenderableType, console: Console | None = None) -> None:
    """Prints a picture: as wide as the window, or for a file or a pipe as wide as it is."""
    console = console or to_stdout()
    if console.is_terminal:
        console.print(view)
        return
    wide = Console(file=(drawn := io.StringIO()), width=UNLIMITED, highlight=False)
    wide.print(view)
    for line in drawn.getvalue().splitlines():
        console.file.write(f"{line.rstrip()}\n")


def summary_view(summary: Summary, *, beside: Iterable[tuple[str, str]] = ()) -> RenderableType:
    """Draws what a run came to, from summary.json; `beside` are rows that others know."""
    return _rows([*summary_rows(summary), *beside])


def last_known_view(known: LastKnown) -> RenderableType:
    """Draws what the run log still tells of a run."""
    tokens = known.tokens
    return _rows(
        [
            ("state", _because(known.state, known.why)),
            ("held-out loss", _losses(known.loss, known.outer_steps)),
            (
                "tokens applied",
                f"{amount(tokens.get('applied'))} of {amount(tokens.get('budget'))}",
            ),
            ("outer steps", amount(known.outer_steps)),
            ("on the wire", f"{bytes_(known.wire.get('bytes_up'))} up"),
            ("wall time", seconds(known.wall_seconds)),
            *((name, _out_of_reach(since)) for name, since in known.away.items()),
        ]
    )


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    rows = [("state", _because(summary.state, summary.why))]
    if goodputs := goodputs_in_words(summary.goodputs):
        rows.append(("goodput", goodputs))
    rows.append(("held-out loss", _losses(summary.loss, summary.outer_steps)))
    if tokens := summary.tokens:
        # Most runs have none that do not count, and need not hear of them.
        shown = [fate for fate in UNAPPLIED if fate != "uncounted" or tokens.uncounted]
        fates = [f"{amount(getattr(tokens, fate))} {fate}" for fate in shown]
        fates = ", ".join([*fates, *given_up(tokens)])
        applied = f"{amount(tokens.applied)} of {amount(tokens.budget)} ({fates})"
        rows.append(("tokens applied", applied))
        if tokens.repeated or tokens.unread:
            twice = f"{amount(tokens.repeated)} tokens read twice, {amount(tokens.unread)} left out"
            rows.append(("text", f"{twice}: a region fell silent and others read on"))
    if summary.overshoot:
        rows.append(("budget", summary.overshoot))
    if summary.goodput is not None:
        rows.append(("kept", f"{percent(summary.goodput)} of the tokens trained are applied"))
    rows.append(("outer steps", amount(summary.outer_steps)))
    if wire := summary.wire:
        up = f"{bytes_(wire.bytes_up)} up at {bits(wire.bits_per_parameter_up)}"
        down = f"{bytes_(wire.bytes_down)} down at {bits(wire.bits_per_parameter_down)}"
        rows.append(("on the wire", f"{up}, {down} bits per parameter"))
    if summary.start:
        rows.append(("began with", began_with(summary.start)))
    if summary.rebuilt:
        rows.append(("rebuilt", continues(summary.rebuilt)))
    return [
        *rows,
        ("wall time", seconds(summary.wall_seconds)),
        *(
            (name, f"failed: {_clause(region.failed)}; it gave {amount(region.applied)} tokens")
            for name, region in summary.regions.items()
            if region.failed
        ),
    ]


def _rows(rows: Iterable[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(label, style="dim"), value)
    return table


def _because(state: str, why: str) -> str:
    return f"{state}: {why}" if why else state


def _out_of_reach(since: float) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    return f"the server is out of reach since {clock}; it trains on and keeps its work"


def _clause(sentence: str) -> str:
    return sentence.removesuffix(".")


class ProgressDisplay:
    """Keeps people informed while a run goes on; use as a context manager."""

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or to_people()
        self._clock = clock
        self._live: Live | None = None
        self._points: deque[tuple[float, float]] = deque()
        self._said_at: float | None = None
        self._states: tuple[str, ...] = ()
        self._seen: SeenRun | None = None
        self._said: deque[Text] = deque(maxlen=LINES_KEPT)
        self._size = self.console.size
        self.rounds = True
        """Whether the last rounds are part of the picture."""
        self.keys = ""
        """What can be pressed, said below the picture."""

    def follow(self, folder: Path | None) -> None:
        """Shows the past too, as far as the run's folder tells; without one, from now on."""
        if self.console.is_terminal:
            self._seen = SeenRun(folder)

    def __enter__(self) -> ProgressDisplay:
        if self.console.is_terminal:
            self._begin()
        return self

    def _begin(self) -> None:
        self._size = self.console.size
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._live.start()

    def _begin_anew(self) -> None:
        """In a window of another size, where nobody knows how the old picture was wrapped."""
        if self._live:
            self._live.stop()
        self.console.clear()
        for line in self._said:
            self.console.print(line, soft_wrap=True)
        self._begin()

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def say(self, text: str, *, style: str | None = None) -> None:
        """Prints one line above the picture."""
        line = Text(text, style=style or "")
        self._said.append(line)
        self.console.print(line, soft_wrap=True)

    def show(self, status: Status) -> None:
        """Takes a fresh status document and shows it, if there is something to show."""
        now = self._clock()
        left = self._time_left(status, now)
        if self._seen:
            self._seen.look(status)
        if self._live:
            if self.console.size != self._size:
                self._begin_anew()
            picture = status_view(
                status,
                left=left,
                seen=self._seen,
                height=self._size.height - bool(self.keys),
                rounds=self.rounds,
            )
            keys = [Text(self.keys, style="dim")] if self.keys else []
            # Without the last, empty line the `^C` a terminal echoes would make it one longer
            # than is wiped away afterwards.
            self._live.update(Group(picture, *keys, Text()), refresh=True)
            return
        states = _states(status)
        since = PLAIN_LINE_SECONDS if self._said_at is None else now - self._said_at
        few = len(status.regions) <= FEW_REGIONS or since >= STATE_SECONDS
        news = states[:2] != self._states[:2] or (states != self._states and few)
        if since >= PLAIN_LINE_SECONDS or news:
            self._said_at, self._states = now, states
            self.say(plain_line(status, left=left))

    def _time_left(self, status: Status, now: float) -> float | None:
        applied = status.tokens.applied
        # The first tokens come after compiling, which says nothing about the pace.
        if not applied or status.state != "training":
            return None
        # Only changes are points: between two outer steps nothing is applied, and a clock
        # that runs on without new tokens would make the estimate swing.
        if not self._points or applied != self._points[-1][1]:
            self._points.append((now, applied))
        while len(self._points) > 2 and now - self._points[0][0] > RATE_WINDOW_SECONDS:
            self._points.popleft()
        return seconds_left(self._points, status.tokens.budget)


def _states(status: Status) -> tuple[str, ...]:
    told = (each for each in status.regions if not status.over or each.state == "failed")
    regions = (f"{each.name}={each.state}" for each in told)
    return (status.state, str(bool(status.trouble)), *regions)


def _losses(losses: LossStatus, outer_steps: int | None) -> str:
    """Says each evaluation once, with the outer steps that its weights had."""
    plain = _plain_losses(losses, outer_steps)
    return "; ".join(filter(None, (plain, average_in_words(losses))))


def _plain_losses(losses: LossStatus, outer_steps: int | None) -> str:
    if losses.heldout is None:
        return "not evaluated yet"
    of = f"{amount(losses.heldout_at)} of {amount(outer_steps)}"
    if (losses.first, losses.first_at) == (losses.heldout, losses.heldout_at):
        return f"{loss(losses.heldout)} at outer step {of}, the only evaluation"
    first = f"{loss(losses.first)} at outer step {amount(losses.first_at)}"
    last = f"{loss(losses.heldout)} at {of}"
    if losses.best_at == losses.heldout_at:
        return f"{first}, {last}, the best"
    if losses.best_at == losses.first_at:
        return f"{first}, the best, {last}"
    return f"{first}, {last}, {loss(losses.best)} at best"
