"""Tables and progress for people.

On a terminal the picture is redrawn in place; elsewhere (a file, a CI log) one plain
line is printed every ten seconds and whenever a state changes. Talk goes to stderr,
what was asked for goes to stdout; NO_COLOR and narrow windows are respected.
"""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_cli.observe.metrics import GOODPUTS, seconds_left, warnings
from diloco_cli.observe.units import amount, bits, bytes_, loss, percent, seconds, state_of

Status = Mapping[str, Any]

PLAIN_LINE_SECONDS = 10.0
RATE_WINDOW_SECONDS = 120.0
UNLIMITED = 10_000
"""Columns of a page that has no right edge."""

_COLOURS = {
    "contributing": "green",
    "training": "yellow",
    "idle": "yellow",
    "away": "red",
    "failed": "red",
    "left": "yellow",
    "done": "green",
    "finished": "green",
    "stopped": "yellow",
}


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
    tokens, losses = status.get("tokens") or {}, status.get("loss") or {}
    wire = status.get("wire") or {}
    why = f" ({status['why']})" if status.get("why") else ""
    parts = [
        f"{status.get('state', 'unknown')}{why}",
        f"{amount(tokens.get('applied'))} of {amount(tokens.get('budget'))} tokens"
        f" ({percent(_share(tokens))})",
        f"held-out {loss(losses.get('heldout'))}",
        f"outer steps {amount(status.get('outer_steps'))}",
        f"bits/param {bits(wire.get('bits_per_parameter_up'))} up"
        f" {bits(wire.get('bits_per_parameter_down'))} down",
        *(_region_line(region) for region in status.get("regions") or []),
    ]
    if left is not None:
        parts.append(f"{seconds(left)} left")
    return " | ".join([*parts, *(f"! {warning}" for warning in warnings(status))])


def summary_view(summary: Mapping[str, Any]) -> RenderableType:
    """Draws what a run came to, from summary.json."""
    table = Table.grid(padding=(0, 2))
    for label, value in summary_rows(summary):
        table.add_row(Text(label, style="dim"), value)
    return table


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokens, wire = summary.get("tokens") or {}, summary.get("wire") or {}
    fates = [f"{amount(tokens.get(fate))} {fate}" for fate in ("pending", "refused", "discarded")]
    why = f": {summary['why']}" if summary.get("why") else ""
    return [
        ("state", f"{summary.get('state', 'unknown')}{why}"),
        ("held-out loss", _losses(summary.get("loss") or {})),
        (
            "tokens applied",
            f"{amount(tokens.get('applied'))} of {amount(tokens.get('budget'))}"
            f" ({', '.join(fates)})",
        ),
        ("outer steps", amount(summary.get("outer_steps"))),
        (
            "on the wire",
            f"{bytes_(wire.get('bytes_up'))} up at {bits(wire.get('bits_per_parameter_up'))},"
            f" {bytes_(wire.get('bytes_down'))} down at"
            f" {bits(wire.get('bits_per_parameter_down'))} bits a parameter",
        ),
        ("goodput", f"{percent(summary.get('goodput'))}{_of_what(summary)}"),
        ("wall time", seconds(summary.get("wall_seconds"))),
        *((str(name), told) for name, told in _fallen(summary)),
        *((str(name), told) for name, told in _away(summary)),
    ]


def _of_what(document: Mapping[str, Any]) -> str:
    """Says the three goodputs, each with what it is a share of; nothing if none is known."""
    found = document.get("goodputs") or {}
    known = [f"{name} {percent(found[name])}" for name in GOODPUTS if found.get(name) is not None]
    return f" ({', '.join(known)})" if known else ""


def _fallen(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Says which regions failed for good, and what they gave before."""
    regions = summary.get("regions") or {}
    every = regions.items() if isinstance(regions, Mapping) else ()
    return [
        (name, f"failed: {_clause(about['failed'])}; it gave {amount(about.get('applied'))} tokens")
        for name, about in every
        if isinstance(about, Mapping) and about.get("failed")
    ]


def _away(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Says since when regions on this host do not reach the server, which may be elsewhere."""
    return [
        (name, f"the server is out of reach since {_clock(when)}; it trains on and keeps its work")
        for name, when in (summary.get("away") or {}).items()
    ]


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _clause(sentence: Any) -> str:
    return str(sentence).removesuffix(".")


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
        tokens = status.get("tokens") or {}
        applied, budget = tokens.get("applied"), tokens.get("budget")
        # The first tokens come after compiling, which says nothing about the pace.
        if not applied or not budget or status.get("state") != "training":
            return None
        # Only changes are points: between two outer steps nothing is applied, and a clock
        # that runs on without new tokens would make the estimate swing.
        if not self._points or applied != self._points[-1][1]:
            self._points.append((now, float(applied)))
        while len(self._points) > 2 and now - self._points[0][0] > RATE_WINDOW_SECONDS:
            self._points.popleft()
        return seconds_left(self._points, budget)


def _headline(status: Status, left: float | None) -> RenderableType:
    tokens = status.get("tokens") or {}
    state = str(status.get("state", "unknown"))
    title = Text()
    title.append(str(status.get("name") or status.get("run") or "run"), style="bold")
    title.append(f"  {state}", style=_COLOURS.get(state, "cyan"))
    if url := status.get("url"):
        title.append(f"  {url}", style="dim")
    if why := status.get("why"):
        title.append(f"\n{why}", style="dim")
    told = f"{amount(tokens.get('applied'))} of {amount(tokens.get('budget'))} tokens"
    if left is not None:
        told += f", {seconds(left)} left"
    done = min(1.0, _share(tokens) or 0.0)
    return Group(title, _Bar(done, told))


@dataclass(frozen=True)
class _Bar:
    """A bar that fills the window with what is told beside it; without a window, a share."""

    done: float
    told: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= UNLIMITED:
            yield Text(f"{percent(self.done)}, {self.told}")
            return
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(ProgressBar(total=1.0, completed=self.done), self.told)
        yield bar


def _figures(status: Status) -> RenderableType:
    losses, wire = status.get("loss") or {}, status.get("wire") or {}
    tokens = status.get("tokens") or {}
    facts = [
        f"held-out loss {loss(losses.get('heldout'))}",
        f"outer steps {amount(status.get('outer_steps'))}",
        f"goodput {percent(status.get('goodput'))}{_of_what(status)}",
    ]
    # Two lines, so that neither is wrapped in a window of 80 columns.
    moved = [
        f"bits/param {bits(wire.get('bits_per_parameter_up'))} up,"
        f" {bits(wire.get('bits_per_parameter_down'))} down",
        *(
            f"{amount(tokens[fate])} {fate}"
            for fate in ("pending", "refused", "discarded")
            if tokens.get(fate)
        ),
    ]
    return Text(" · ".join(facts) + "\n" + " · ".join(moved))


def _regions(status: Status) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("region", no_wrap=True, max_width=16, overflow="ellipsis")
    for heading in ("step", "loss", "tok/s", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for region in status.get("regions") or []:
        word = state_of(region)
        told = Text(word, style=_COLOURS[word])
        if why := _reason(region):
            told.append(f": {why}", style="dim")
        if region.get("restarts"):
            told.append(f" ({region['restarts']} restarts)", style="yellow")
        table.add_row(
            Text(str(region.get("name", "?"))),
            amount(region.get("step")),
            loss(region.get("loss")),
            amount(region.get("tokens_per_second")),
            percent(region.get("share")),
            told,
        )
    return table


def _region_line(region: Status) -> str:
    word = state_of(region)
    why = f" ({reason})" if (reason := _reason(region)) and word != "contributing" else ""
    return (
        f"{region.get('name', '?')}: {word}{why}, step {amount(region.get('step'))},"
        f" loss {loss(region.get('loss'))}, {amount(region.get('tokens_per_second'))} tok/s,"
        f" share {percent(region.get('share'))}"
    )


def _reason(region: Status) -> str:
    """Says what the region waits for; nothing while it trains as it should."""
    if failed := region.get("failed"):
        return str(failed)
    why = str(region.get("why") or "")
    return "" if why == "training" else why


def _states(status: Status) -> tuple[str, ...]:
    regions: Sequence[Status] = status.get("regions") or []
    run = (str(status.get("state")), str(bool(status.get("trouble"))))
    return (*run, *(f"{r.get('name')}={state_of(r)}" for r in regions))


def _share(tokens: Mapping[str, Any]) -> float | None:
    applied, budget = tokens.get("applied"), tokens.get("budget")
    return applied / budget if applied is not None and budget else None


def _losses(losses: Mapping[str, Any]) -> str:
    last, first, best = (losses.get(key) for key in ("heldout", "first", "best"))
    if first is None:
        return loss(last)
    return f"{loss(first)} at the start, {loss(last)} at the end, {loss(best)} at best"
