"""Tables and progress for people.

On a terminal the picture is redrawn in place; elsewhere (a file, a CI log) one plain
line is printed every ten seconds and whenever a state changes. Talk goes to stderr,
what was asked for goes to stdout; NO_COLOR and narrow windows are respected.
"""

from __future__ import annotations

import io
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_cli.observe.metrics import per_device, seconds_left, standing_in_words, warnings
from diloco_cli.observe.status import (
    Goodputs,
    LastKnown,
    LossStatus,
    RegionStatus,
    RunTokens,
    StartStatus,
    Status,
    Summary,
)
from diloco_cli.observe.units import amount, bits, bytes_, loss, percent, seconds
from diloco_cli.wire.messages import Amendment

PLAIN_LINE_SECONDS = 10.0
RATE_WINDOW_SECONDS = 120.0
TABLE_WIDTH = 60
MOST_RETIRED = 8
"""Retired regions that a table shows."""
MOST_AMENDMENTS = 3
"""That a status on a terminal shows; the document has more."""
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
    "expected": "cyan",
    "retired": "dim",
    "done": "green",
    "finished": "green",
    "stopped": "yellow",
}


_UNAPPLIED = ("uncounted", "pending", "refused", "discarded")


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
    amended = [Text(line, style="dim") for line in amendment_lines(status.amendments)]
    named = [(region.name, per_device(region)) for region in status.regions]
    devices = [Text(f"{name}: {facts}", style="dim") for name, facts in named if facts]
    return Group(
        _headline(status, left), _figures(status), _Regions(status), *devices, *amended, *alarms
    )


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
        *(_region_line(region, status) for region in status.regions if not region.retired),
        *([words] if (words := standing_in_words(status)) else ()),
    ]
    if left is not None:
        parts.append(f"{seconds(left)} left")
    return " | ".join([*parts, *(f"! {warning}" for warning in warnings(status))])


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
    if goodputs := _goodputs(summary.goodputs):
        rows.append(("goodput", goodputs))
    rows.append(("held-out loss", _losses(summary.loss, summary.outer_steps)))
    if tokens := summary.tokens:
        # Most runs have none that do not count, and need not hear of them.
        shown = [fate for fate in _UNAPPLIED if fate != "uncounted" or tokens.uncounted]
        fates = [f"{amount(getattr(tokens, fate))} {fate}" for fate in shown]
        fates = ", ".join([*fates, *_given_up(tokens)])
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
        rows.append(("began with", _began_with(summary.start)))
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


def _began_with(start: StartStatus) -> str:
    momentum = ", and its momentum" if start.momentum == "keep" else ""
    return f"{start.source}{momentum}, digest {start.weights[:12]}"


def _because(state: str, why: str) -> str:
    return f"{state}: {why}" if why else state


def _goodputs(goodputs: Goodputs) -> str:
    """Says those of the three goodputs that are known, the one of time first."""
    shares = ((name, getattr(goodputs, name)) for name in Goodputs.model_fields)
    return ", ".join(f"{name} {percent(share)}" for name, share in shares if share is not None)


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


def amendment_lines(amendments: Sequence[Amendment]) -> list[str]:
    """Says who changed what and when, the newest last."""
    earlier = len(amendments) - MOST_AMENDMENTS
    noun = "amendment" if earlier == 1 else "amendments"
    lines = [f"{earlier} earlier {noun}: --format json lists them"] if earlier > 0 else []
    for amendment in amendments[-MOST_AMENDMENTS:]:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(amendment.time or 0))
        changes = [
            *(
                f"{key}={json.dumps(value, ensure_ascii=False)}"
                for key, value in amendment.set.items()
            ),
            *(f"+{region.get('name')}" for region in amendment.add),
            *(f"-{name}" for name in amendment.remove),
            *(f"pace of {name} learnt anew" for name in amendment.repace),
        ]
        why = f" ({amendment.why})" if amendment.why else ""
        lines.append(
            f"amendment {amendment.number}, {made}, by {amendment.by}: {', '.join(changes)}{why}"
        )
    return lines


def _figures(status: Status) -> RenderableType:
    wire, tokens = status.wire, status.tokens
    heldout, at = f"held-out loss {loss(status.loss.heldout)}", status.loss.heldout_at
    facts = [heldout, f"outer steps {amount(status.outer_steps)}"]
    if at is not None:
        facts = [f"{heldout} at outer step {amount(at)} of {amount(status.outer_steps)}"]
    shares = [f"goodput: {goodputs}"] if (goodputs := _goodputs(status.goodputs)) else []
    if status.goodput is not None:
        shares.append(f"kept {percent(status.goodput)}")
    # Lines of their own, so that none is wrapped in a window of 80 columns.
    moved = [
        f"bits/param {bits(wire.bits_per_parameter_up)} up,"
        f" {bits(wire.bits_per_parameter_down)} down",
        *(
            f"{amount(getattr(tokens, fate))} {fate}"
            for fate in _UNAPPLIED
            if getattr(tokens, fate)
        ),
        *_given_up(tokens),
    ]
    began = [f"began with {_began_with(status.start)}"] if status.start else []
    who = [words] if (words := standing_in_words(status)) else []
    lines = (facts, shares, moved, began, who)
    return Text("\n".join(" · ".join(line) for line in lines if line))


@dataclass(frozen=True)
class _Regions:
    """One row per region; where a table has no room for what a region does, one sentence each."""

    status: Status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < TABLE_WIDTH:
            yield from (Text(_region_line(region, self.status)) for region in _shown(self.status))
        else:
            yield _region_table(self.status)


def _region_table(status: Status) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("region", no_wrap=True, max_width=16, overflow="ellipsis")
    for heading in ("step", "loss", "tok/s", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for region in _shown(status):
        state = Text(region.state, style=_COLOURS[region.state])
        if region.member and not region.listed:
            state.append(" (not listed)", style="dim")
        if why := _reason(region):
            state.append(f": {why}", style="dim")
        if late := _behind(region, status.terms):
            state.append(f" ({late})", style="yellow")
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


def _shown(status: Status) -> list[RegionStatus]:
    """All but the retired, and of those the last."""
    retired = [region for region in status.regions if region.retired]
    return [region for region in status.regions if not region.retired] + retired[:MOST_RETIRED]


def _given_up(tokens: RunTokens) -> list[str]:
    given_up = tokens.given_up
    return [f"of these {amount(given_up)} given up by retired regions"] if given_up else []


def _region_line(region: RegionStatus, status: Status) -> str:
    reason = "" if region.state == "contributing" else _reason(region)
    reason = "; ".join(filter(None, (reason, _behind(region, status.terms))))
    return (
        f"{region.name}: {region.state}{f' ({reason})' if reason else ''},"
        f" step {amount(region.step)}, loss {loss(region.loss)},"
        f" {amount(region.tokens_per_second)} tok/s, share {percent(region.share)}"
    )


def _behind(region: RegionStatus, newest: int) -> str:
    """Says that a region has not followed the newest amendment yet."""
    late = region.alive and region.terms is not None and region.terms < newest
    return f"under terms {region.terms} of {newest}" if late else ""


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


def _losses(losses: LossStatus, outer_steps: int | None) -> str:
    """Says each evaluation once, with the outer steps that its weights had."""
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
