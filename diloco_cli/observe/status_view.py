"""A status document as people read it: a picture for a terminal, a line for a log.

What is wrong comes first, in both. Names may be long, and written from right to left.
"""

from __future__ import annotations

import json
import time
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_cli.observe.history import Curves
from diloco_cli.observe.metrics import (
    average_in_words,
    per_device,
    standing_in_words,
    thrown_away,
    warnings,
)
from diloco_cli.observe.seen_run import SeenRun
from diloco_cli.observe.status import (
    Goodputs,
    RebuiltStatus,
    RegionStatus,
    RunTokens,
    StartStatus,
    Status,
)
from diloco_cli.observe.text_charts import lane, span_of, sparkline
from diloco_cli.observe.units import UNKNOWN, amount, bits, loss, percent, seconds
from diloco_cli.wire.messages import Amendment

TABLE_WIDTH, WIDE, ROOMY = 60, 80, 100
LONGEST_NAME = 16
FEWEST_ROWS = 4
"""Regions that are shown in a window however low it is."""
MOST_LANES, WIDEST_LANE, LABEL = 6, 100, 8
SPARK_CELLS, REGION_CELLS, LEAST_SPARK = 24, 12, 6
"""Letters of the run's curves, of a region's, and the fewest that are worth it."""
MOST_NAMED, LONGEST_REASON = 3, 80
"""Regions that a plain line names, and letters of why they do not contribute."""
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
    "diverging": "red",
    "away": "red",
    "failed": "red",
    "left": "yellow",
    "expected": "cyan",
    "retired": "dim",
    "done": "green",
    "finished": "green",
    "stopped": "yellow",
}


_WELL = {"contributing": 2, "done": 2, "retired": 3, "training": 1, "starting": 1}
"""States by how little they need to be looked at."""

UNAPPLIED = ("uncounted", "pending", "refused", "discarded")


def status_view(
    status: Status,
    *,
    left: float | None = None,
    seen: SeenRun | None = None,
    height: int | None = None,
    rounds: bool = True,
) -> RenderableType:
    """Draws a status document: what is wrong, the run, one row per region, the last rounds.

    `seen` adds curves and, where wanted, `rounds`; with a `height` the regions get what the rest
    leaves of it.
    """
    alarms = [Text(f"! {warning}", style="bold red") for warning in warnings(status)]
    amended = [Text(line, style="dim") for line in amendment_lines(status.amendments)]
    named = [(region.name, per_device(region)) for region in status.regions]
    devices = [Text(f"{isolated(name)}: {facts}", style="dim") for name, facts in named if facts]
    drawn = rounds and seen and seen.rounds and not status.over
    lanes = _RoundLanes(status, seen) if drawn and seen else None
    rows = None
    if height is not None:
        taken = len(alarms) + len(amended) + len(devices) + 10 + (lanes.height if lanes else 0)
        rows = max(FEWEST_ROWS, height - taken)
    return Group(
        *alarms,
        _headline(status, left),
        _Figures(status, seen),
        _Regions(status, seen, rows),
        *devices,
        *amended,
        *([lanes] if lanes else []),
    )


def plain_line(status: Status, *, left: float | None = None) -> str:
    """Says the same in one line, for logs: short, and what is wrong first."""
    why = f" ({status.why})" if status.why else ""
    tokens, regions = status.tokens, [each for each in status.regions if not each.retired]
    well = [region for region in regions if region.state in ("contributing", "done")]
    others = [region for region in regions if region not in well]
    parts = [
        *(f"! {warning}" for warning in warnings(status)),
        f"{status.state}{why}",
        f"{_progress(tokens)} ({percent(_share(tokens))})",
        *([f"{seconds(left)} left"] if left is not None else ()),
        f"held-out {loss(status.loss.heldout)}",
    ]
    if status.over:
        failed = [_region_words(region, status) for region in others if region.state == "failed"]
        return " | ".join([*parts, *failed[:MOST_NAMED]])
    parts += [
        f"{len(well)} of {len(regions)} regions contribute, {amount(_speed(status))} tok/s",
        *([thrown] if (thrown := thrown_away(tokens)) else ()),
        *(_region_words(region, status) for region in others[:MOST_NAMED]),
        *([f"and {len(others) - MOST_NAMED} more"] if len(others) > MOST_NAMED else ()),
        *([words] if (words := standing_in_words(status)) else ()),
    ]
    return " | ".join(parts)


def _region_words(region: RegionStatus, status: Status) -> str:
    reason = "; ".join(filter(None, (_reason(region), _behind(region, status.terms))))
    words = f"{isolated(region.name)} {region.state}"
    return f"{words}: {shorten(reason, LONGEST_REASON, placeholder=' …')}" if reason else words


def _speed(status: Status) -> float:
    return sum(region.tokens_per_second or 0.0 for region in status.regions if region.alive)


def _headline(status: Status, left: float | None) -> RenderableType:
    title = Text()
    title.append(isolated(status.name), style="bold")
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


@dataclass(frozen=True)
class _Figures:
    """The run in numbers, a line for what belongs together; with curves where there is room."""

    status: Status
    seen: SeenRun | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _figures(self.status)
        if self.seen and not self.status.over:
            room = options.max_width
            history = self.seen.history
            losses = [point.loss for point in history.evaluations]
            _, columns = history.run.since(0.0, SPARK_CELLS)
            speed = f"speed {amount(_speed(self.status))} tok/s"
            lines[0] = _beside(lines[0], sparkline(losses, SPARK_CELLS, falls=True), room)
            curve = sparkline(columns["tokens_per_second"], SPARK_CELLS)
            lines.insert(1, _beside(speed, curve, room))
        yield Text("\n".join(lines))


def _beside(text: str, curve: str, room: int) -> str:
    """Puts a curve after a line, or its newest part, or nothing where a line has no room left."""
    free = room - cell_len(text) - 2
    return f"{text}  {curve[-free:]}" if curve and free >= LEAST_SPARK else text


def _figures(status: Status) -> list[str]:
    """The run in numbers, the held-out loss first."""
    wire, tokens = status.wire, status.tokens
    heldout, at = f"held-out loss {loss(status.loss.heldout)}", status.loss.heldout_at
    facts = [heldout, f"outer steps {amount(status.outer_steps)}"]
    if at is not None:
        facts = [f"{heldout} at outer step {amount(at)} of {amount(status.outer_steps)}"]
    facts += [average] if (average := average_in_words(status.loss)) else []
    shares = [f"goodput: {goodputs}"] if (goodputs := goodputs_in_words(status.goodputs)) else []
    if status.goodput is not None:
        shares.append(f"kept {percent(status.goodput)}")
    # Lines of their own, so that none is wrapped in a window of 80 columns.
    moved = [
        f"bits/param {bits(wire.bits_per_parameter_up)} up,"
        f" {bits(wire.bits_per_parameter_down)} down",
        *(f"{amount(getattr(tokens, fate))} {fate}" for fate in UNAPPLIED if getattr(tokens, fate)),
        *given_up(tokens),
    ]
    began = [f"began with {began_with(status.start)}"] if status.start else []
    rebuilt = [continues(status.rebuilt)] if status.rebuilt else []
    who = [words] if (words := standing_in_words(status)) else []
    lines = (facts, shares, moved, began, rebuilt, who)
    return [" · ".join(line) for line in lines if line]


@dataclass(frozen=True)
class _Regions:
    """One row per region; where a table has no room for what a region does, one sentence each."""

    status: Status
    seen: SeenRun | None = None
    most: int | None = None
    """Rows; of more regions those come first that do not contribute."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, rest = _shown(self.status), []
        if self.most is not None and len(shown) > self.most:
            shown.sort(key=lambda region: _WELL.get(region.state, 0))
            shown, rest = shown[: self.most - 1], shown[self.most - 1 :]
        if options.max_width < TABLE_WIDTH:
            yield from (Text(_region_line(region, self.status)) for region in shown)
        else:
            curves = self.seen.history.regions if self.seen else {}
            wide = options.max_width >= WIDE and not self.status.over
            links = options.max_width >= ROOMY and not self.status.over
            yield _region_table(self.status, shown, curves if wide else {}, links=links)
        if rest:
            states = Counter(region.state for region in rest)
            words = ", ".join(f"{count} {state}" for state, count in states.items())
            yield Text(f"and {len(rest)} more: {words}", style="dim")


def _region_table(
    status: Status,
    regions: Sequence[RegionStatus],
    curves: Mapping[str, Curves],
    *,
    links: bool = False,
) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("region", no_wrap=True)
    for heading in ("step", "loss", *(["", "tok/s", ""] if curves else ["tok/s"]), "share"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    if links:
        table.add_column("MB/s up/down", justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for region in regions:
        falling, running = _region_curves(curves.get(region.name)) if curves else ([], [])
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
            Text(isolated(shortened(region.name, LONGEST_NAME))),
            amount(region.step),
            loss(region.loss),
            *falling,
            amount(region.tokens_per_second),
            *running,
            percent(region.share),
            *([_link(region)] if links else []),
            state,
        )
    return table


def _link(region: RegionStatus) -> str:
    """What was measured of a region's line in each direction."""
    rates = (region.link_up, region.link_down)
    return "/".join(UNKNOWN if rate is None else f"{rate / 1e6:.1f}" for rate in rates)


def _region_curves(curves: Curves | None) -> tuple[list[str], list[str]]:
    if curves is None:
        return [""], [""]
    _, columns = curves.since(0.0, SPARK_CELLS)
    return (
        [sparkline(columns["loss"], REGION_CELLS, falls=True)],
        [sparkline(columns["tokens_per_second"], REGION_CELLS)],
    )


@dataclass(frozen=True)
class _RoundLanes:
    """The last rounds of every fragment: when it was called, gathered, published, taken over."""

    status: Status
    seen: SeenRun

    @property
    def fragments(self) -> list[int]:
        return sorted({record.fragment for record in self.seen.rounds})

    @property
    def height(self) -> int:
        return 1 + min(MOST_LANES + 1, len(self.fragments))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        span, fragments = span_of(self.seen.rounds), self.fragments
        heading = f"rounds, last {seconds(span)}"
        legend = "   ╶ called  ░ gathering  ◆ new version  ○ taken over"
        yield Text(heading + (legend if options.max_width >= WIDE else ""), style="dim")
        for fragment in fragments[:MOST_LANES]:
            records = [each for each in self.seen.rounds if each.fragment == fragment]
            newest = max(each.version + (each.published is not None) for each in records)
            label = f"{fragment} v{newest}".ljust(LABEL)
            width = min(options.max_width, WIDEST_LANE) - LABEL
            yield Text(label + lane(records, self.seen.now, span, width), no_wrap=True)
        if len(fragments) > MOST_LANES:
            yield Text(f"and {len(fragments) - MOST_LANES} fragments more", style="dim")


def isolated(name: str) -> str:
    """Keeps a name that is written from right to left from turning the rest of its line round."""
    turns = any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in name)
    return f"\u2068{name}\u2069" if turns else name


def shortened(name: str, most: int) -> str:
    """Leaves out the middle of a long name: beginnings are often alike."""
    if cell_len(name) <= most:
        return name
    ending = name
    while cell_len(ending) > most // 2 - 1:
        ending = ending[1:]
    return f"{set_cell_size(name, most - 1 - cell_len(ending)).rstrip()}…{ending}"


def _shown(status: Status) -> list[RegionStatus]:
    """All but the retired, and of those the last."""
    retired = [region for region in status.regions if region.retired]
    return [region for region in status.regions if not region.retired] + retired[:MOST_RETIRED]


def given_up(tokens: RunTokens) -> list[str]:
    given_up = tokens.given_up
    return [f"of these {amount(given_up)} given up by retired regions"] if given_up else []


def _region_line(region: RegionStatus, status: Status) -> str:
    reason = "" if region.state == "contributing" else _reason(region)
    reason = "; ".join(filter(None, (reason, _behind(region, status.terms))))
    return (
        f"{isolated(region.name)}: {region.state}{f' ({reason})' if reason else ''},"
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


def began_with(start: StartStatus) -> str:
    momentum = ", and its momentum" if start.momentum == "keep" else ""
    return f"{start.source}{momentum}, digest {start.weights[:12]}"


def continues(rebuilt: RebuiltStatus) -> str:
    """Says what a run goes on from, and what went with the server before."""
    lost = f"{amount(rebuilt.lost)} merged tokens lost with it" if rebuilt.lost else "nothing lost"
    words = f"continues run {rebuilt.continues[-1]}, whose server was lost or set back: {lost}"
    if rebuilt.awaited:
        words += f", without {', '.join(map(isolated, rebuilt.awaited))}, not back yet"
    return words


def goodputs_in_words(goodputs: Goodputs) -> str:
    """Says those of the three goodputs that are known, the one of time first."""
    shares = ((name, getattr(goodputs, name)) for name in Goodputs.model_fields)
    return ", ".join(f"{name} {percent(share)}" for name, share in shares if share is not None)


def _progress(tokens: RunTokens) -> str:
    return f"{amount(tokens.applied)} of {amount(tokens.budget)} tokens"


def _share(tokens: RunTokens) -> float:
    return tokens.applied / tokens.budget
