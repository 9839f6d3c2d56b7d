"""Tables and progress for people.

On a terminal the picture is redrawn in place; elsewhere (a file, a CI log) one plain
line is printed every ten seconds and whenever a state changes. Talk goes to stderr,
what was asked for goes to stdout; NO_COLOR and narrow windows are respected.
"""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_cli.observe.metrics import seconds_left, warnings
from diloco_cli.observe.status import (
    Goodputs,
    LastKnown,
    LossStatus,
    RegionStatus,
    RunTokens,
    Status,
    Summary,
)
from diloco_cli.observe.units import amount, bits, bytes_, loss, percent, seconds

PLAIN_LINE_SECONDS = 10.0
RATE_WINDOW_SECONDS = 120.0
UNLIMITED = 10_000
"""Columns of a page that has no right edge."""

_COLOURS = {
    "contributing": "green",
    "training": "yellow",
    "starting": "cyan",
    "idle": "yellow",
    "away": "red",
    "failed": "red",
    "left": "yellow",
    "done": "green",
    "finished": "green",
    "stopped": "yellow",
}


_UNAPPLIED = ("pending", "refused", "discarded")


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


def status_view(status: Status, *, left: float | None = None) -> RenderableType:
    """Draws a status document: the run on top, one row per region below."""
    alarms = [Text(f"! {warning}", style="bold red") for warning in warnings(status)]
    return Group(_headline(status, left), _figures(status), _regions(status), *alarms)


def plain_line(status: Status, *, left: float | None = None) -> str:
    """Says the same in one line, for logs."""
    tokens, wire = status.tokens, status.wire
    why = f" ({status.why})" if status.why else ""
    parts = [
        f"{status.state}{why}",
        f"{_progress(tokens)} ({percent(_share(tokens))})",
        f"held-out {loss(status.loss.heldout)}",
        f"outer steps {amount(status.outer_steps)}",
        f"bits/param {bits(wire.bits_per_parameter_up)} up"
        f" {bits(wire.bits_per_parameter_down)} down",
        *(_region_line(region) for region in status.regions),
    ]
    if left is not None:
        parts.append(f"{seconds(left)} left")
    return " | ".join([*parts, *(f"! {warning}" for warning in warnings(status))])


def summary_view(summary: Summary) -> RenderableType:
    """Draws what a run came to, from summary.json."""
    return _rows(summary_rows(summary))


def last_known_view(known: LastKnown) -> RenderableType:
    """Draws what the run log still tells of a run."""
    tokens = known.tokens
    return _rows(
        [
            ("state", _because(known.state, known.why)),
            ("held-out loss", _losses(known.loss)),
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
    rows = [
        ("state", _because(summary.state, summary.why)),
        ("held-out loss", _losses(summary.loss)),
    ]
    if tokens := summary.tokens:
        fates = ", ".join(f"{amount(getattr(tokens, fate))} {fate}" for fate in _UNAPPLIED)
        applied = f"{amount(tokens.applied)} of {amount(tokens.budget)} ({fates})"
        rows.append(("tokens applied", applied))
    rows.append(("outer steps", amount(summary.outer_steps)))
    if wire := summary.wire:
        up = f"{bytes_(wire.bytes_up)} up at {bits(wire.bits_per_parameter_up)}"
        down = f"{bytes_(wire.bytes_down)} down at {bits(wire.bits_per_parameter_down)}"
        rows.append(("on the wire", f"{up}, {down} bits per parameter"))
    return [
        *rows,
        ("goodput", f"{percent(summary.goodput)}{_of_what(summary.goodputs)}"),
        ("wall time", seconds(summary.wall_seconds)),
        *(
            (name, f"failed: {_clause(region.failed)}; it gave {amount(region.applied)} tokens")
            for name, region in summary.regions.items()
            if region.failed
        ),
    ]


def _rows(rows: Iterable[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for label, value in rows:
        table.add_row(Text(label, style="dim"), value)
    return table


def _because(state: str, why: str) -> str:
    return f"{state}: {why}" if why else state


def _of_what(goodputs: Goodputs) -> str:
    """Says the three goodputs, each with what it is a share of; nothing if none is known."""
    shares = [f"{name} {percent(share)}" for name, share in goodputs if share is not None]
    return f" ({', '.join(shares)})" if shares else ""


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

    def __enter__(self) -> ProgressDisplay:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def say(self, text: str, *, style: str | None = None) -> None:
        """Prints one line above the picture."""
        self.console.print(Text(text, style=style or ""), soft_wrap=True)

    def show(self, status: Status) -> None:
        """Takes a fresh status document and shows it, if there is something to show."""
        now = self._clock()
        left = self._time_left(status, now)
        if self._live:
            # Without the last, empty line the `^C` a terminal echoes would make it one longer
            # than is wiped away afterwards.
            self._live.update(Group(status_view(status, left=left), Text()))
            return
        states = _states(status)
        due = self._said_at is None or now - self._said_at >= PLAIN_LINE_SECONDS
        if due or states != self._states:
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


def _headline(status: Status, left: float | None) -> RenderableType:
    title = Text()
    title.append(status.name, style="bold")
    title.append(f"  {status.state}", style=_COLOURS.get(status.state, "cyan"))
    title.append(f"  {status.url}", style="dim")
    if status.why:
        title.append(f"\n{status.why}", style="dim")
    progress = _progress(status.tokens)
    if left is not None:
        progress += f", {seconds(left)} left"
    return Group(title, _Bar(min(1.0, _share(status.tokens)), progress))


@dataclass(frozen=True)
class _Bar:
    """A bar that fills the window, with text beside it; without a window, a percentage."""

    done: float
    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= UNLIMITED:
            yield Text(f"{percent(self.done)}, {self.text}")
            return
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(ProgressBar(total=1.0, completed=self.done), self.text)
        yield bar


def _figures(status: Status) -> RenderableType:
    wire, tokens = status.wire, status.tokens
    facts = [
        f"held-out loss {loss(status.loss.heldout)}",
        f"outer steps {amount(status.outer_steps)}",
        f"goodput {percent(status.goodput)}{_of_what(status.goodputs)}",
    ]
    # Two lines, so that neither is wrapped in a window of 80 columns.
    moved = [
        f"bits/param {bits(wire.bits_per_parameter_up)} up,"
        f" {bits(wire.bits_per_parameter_down)} down",
        *(
            f"{amount(getattr(tokens, fate))} {fate}"
            for fate in _UNAPPLIED
            if getattr(tokens, fate)
        ),
    ]
    return Text(" · ".join(facts) + "\n" + " · ".join(moved))


def _regions(status: Status) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("region", no_wrap=True, max_width=16, overflow="ellipsis")
    for heading in ("step", "loss", "tok/s", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for region in status.regions:
        state = Text(region.state, style=_COLOURS[region.state])
        if why := _reason(region):
            state.append(f": {why}", style="dim")
        if region.restarts:
            state.append(f" ({region.restarts} restarts)", style="yellow")
        table.add_row(
            Text(region.name),
            amount(region.step),
            loss(region.loss),
            amount(region.tokens_per_second),
            percent(region.share),
            state,
        )
    return table


def _region_line(region: RegionStatus) -> str:
    reason = "" if region.state == "contributing" else _reason(region)
    return (
        f"{region.name}: {region.state}{f' ({reason})' if reason else ''},"
        f" step {amount(region.step)}, loss {loss(region.loss)},"
        f" {amount(region.tokens_per_second)} tok/s, share {percent(region.share)}"
    )


def _reason(region: RegionStatus) -> str:
    """Says what the region waits for; nothing while it trains as it should."""
    if region.starting or region.why == "training":
        return region.failed
    return region.failed or region.why


def _states(status: Status) -> tuple[str, ...]:
    regions = (f"{region.name}={region.state}" for region in status.regions)
    return (status.state, str(bool(status.trouble)), *regions)


def _progress(tokens: RunTokens) -> str:
    return f"{amount(tokens.applied)} of {amount(tokens.budget)} tokens"


def _share(tokens: RunTokens) -> float:
    return tokens.applied / tokens.budget


def _losses(losses: LossStatus) -> str:
    if losses.first is None:
        return loss(losses.heldout)
    first, last, best = loss(losses.first), loss(losses.heldout), loss(losses.best)
    return f"{first} at the start, {last} at the end, {best} at best"
