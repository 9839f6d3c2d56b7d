"""Two steady regions and six that come and go: is the compute used that is there, and is the
loss that of steady regions?

    python -m tests.verify.results.scavenging --minutes 20 --visits 30 --out build/scavenging
    python -m tests.verify.results.scavenging --png docs/results/scavenging.png

Real processes on this machine, each at the pace of `chaos.step_seconds`. First the run with
visitors, by a schedule drawn from the seed: `visits` joins and as many leaves (SIGTERM). Then
steady regions alone, as many as the visitors' compute amounts to, up to the same tokens. A run
whose result is in the folder is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.assemble import load_run
from diloco_cli.observe.events import Event, read_events
from diloco_cli.observe.status import Status
from diloco_cli.run.ask import ShortCalls
from diloco_cli.run.folder import address_of, last_summary
from tests import ROOT

SPEC = Path(__file__).with_name("scavenging.yaml")
VISITORS = 6
SHORTEST = 60.0
"""Seconds of a visit: one that ends while its trainer compiles has nothing to give."""
SHARE, LOSS = 0.97, 0.01
"""Goals: of the compute that was there, and beyond the loss of steady regions."""
POLL = 1.0
DEADLINE = 180.0


@dataclass(frozen=True)
class Visit:
    region: str
    start: float
    end: float


def drawn(seed: int, seconds: float, visits: int) -> list[Visit]:
    """The visits of all visitors, each one's apart from each other."""
    rng = random.Random(f"visits {seed}")
    found = []
    for number in range(VISITORS):
        count = visits // VISITORS + (number < visits % VISITORS)
        slot = seconds / max(1, count)
        for turn in range(count):
            begin = turn * slot + rng.uniform(0.0, 0.25) * slot
            longest = (turn + 1) * slot - begin - 5.0
            length = rng.uniform(min(SHORTEST, longest), longest)
            found.append(Visit(f"visitor-{number + 1}", begin, begin + length))
    return sorted(found, key=lambda visit: visit.start)


class Processes:
    """The server and the workers of one run, each started and stopped by its name."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder = folder
        self._overrides = [word for each in overrides for word in ("--set", each)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def start(self, name: str, *words: str) -> None:
        command = [sys.executable, "-m", "diloco_cli", *words, "--dir", str(self.folder / "run")]
        with open(self.folder / "logs" / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                [*command, *self._overrides], stdout=log, stderr=log, cwd=ROOT
            )

    def serve(self) -> str:
        self.start("server", "serve", str(SPEC))
        deadline = time.monotonic() + DEADLINE
        while not (url := address_of(self.folder / "run").url):
            if time.monotonic() > deadline or self._running["server"].poll() is not None:
                raise SystemExit(f"the server did not start; see {self.folder}/logs/server.log")
            time.sleep(POLL)
        return url

    def work(self, region: str, url: str) -> None:
        self.start(region, "work", str(SPEC), "--region", region, "--server", url)

    def stop(self, name: str) -> None:
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE)

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def with_visitors(folder: Path, seed: int, seconds: float, visits: int) -> dict[str, Any]:
    """Runs the schedule; gives what was trained beside what could have been."""
    schedule = drawn(seed, seconds, visits)
    changes = [(visit.start, "join", visit.region) for visit in schedule]
    changes += [(visit.end, "leave", visit.region) for visit in schedule]
    processes = Processes(folder, [])
    left: dict[str, list[float]] = {}
    try:
        url = processes.serve()
        for region in ("steady-1", "steady-2"):
            processes.work(region, url)
        _wait_for_steps(url, 2)
        began = time.time()
        for at, what, region in sorted(changes):
            time.sleep(max(0.0, began + at - time.time()))  # The schedule is what is tried.
            if what == "join":
                processes.work(region, url)
            else:
                left.setdefault(region, []).append(time.time())
                processes.stop(region)
        time.sleep(max(0.0, began + seconds - time.time()))
        ended = time.time()
        # While everybody is there: who has left keeps what it holds until it is back.
        status = ShortCalls().status(url)
        _stop(processes, url)
    finally:
        processes.close()
    events = list(read_events(folder / "run" / "events.jsonl"))
    there = _there(events, left, ended)
    return {
        "seed": seed,
        "seconds": round(seconds),
        "scheduled": len(schedule),
        "joins": _count(events, "joined"),
        "leaves": _count(events, "left"),
        "presence": there,
        "began": began,
        **_measured(folder, events, status, there),
    }


def steady(folder: Path, regions: int, tokens: int) -> dict[str, Any]:
    """As many steady regions as were there on average, up to the same tokens."""
    names = [f"steady-{number + 1}" for number in range(regions)]
    listed = "[" + ", ".join(f"{{name: {name}}}" for name in names) + "]"
    processes = Processes(folder, [f"budget.tokens={tokens}", f"regions={listed}"])
    try:
        url = processes.serve()
        for region in names:
            processes.work(region, url)
        began = time.time()
        while (summary := last_summary(folder / "run")) is None or summary.state != "finished":
            time.sleep(POLL)
            if time.time() - began > 20 * DEADLINE:
                raise SystemExit("the steady run does not end")
        ended = time.time()
    finally:
        processes.close()
    events = list(read_events(folder / "run" / "events.jsonl"))
    return {
        "regions": regions,
        "budget": tokens,
        "seconds": round(ended - began),
        "curve": curve(events),
        "tokens": summary.tokens.plain() if summary.tokens else {},
        "loss": summary.loss.plain(),
    }


def _count(events: list[Event], kind: str) -> int:
    """How often that happened to a visitor, as the server saw it."""
    return sum(
        event.kind == kind and str(event.fields.get("region")).startswith("visitor")
        for event in events
    )


def _wait_for_steps(url: str, count: int) -> None:
    calls, deadline = ShortCalls(), time.monotonic() + DEADLINE
    while sum(bool(region.step) for region in calls.status(url).regions) < count:
        if time.monotonic() > deadline:
            raise SystemExit("the steady regions did not begin")
        time.sleep(POLL)


def _stop(processes: Processes, url: str) -> None:
    ShortCalls().stop(url)
    for name in ("steady-1", "steady-2", "server"):
        processes.stop(name)


def _there(
    events: list[Event], left: dict[str, list[float]], ended: float
) -> dict[str, list[tuple[float, float]]]:
    """By region: from each first step of a trainer to the moment its worker was told to leave."""
    presence: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.kind == "first-step":
            region = event.fields["region"]
            ends = [at for at in left.get(region, []) if at > event.time]
            presence.setdefault(region, []).append((event.time, min(ends, default=ended)))
    return presence


def _measured(
    folder: Path,
    events: list[Event],
    status: Status,
    there: dict[str, list[tuple[float, float]]],
) -> dict[str, Any]:
    spec = load_run(SPEC).spec
    assert spec.chaos and spec.chaos.step_seconds
    pace = spec.inner.batch * spec.inner.sequence / spec.chaos.step_seconds
    possible = pace * sum(end - begin for spans in there.values() for begin, end in spans)
    tokens = status.tokens
    lost = sum(region.lost for region in status.regions)
    summary = last_summary(folder / "run")
    return {
        "pace": pace,
        "possible": round(possible),
        "trained": round(tokens.trained + lost),
        "tokens": tokens.plain(),
        "share": (tokens.trained + lost) / possible,
        "balanced": summary.balanced if summary else None,
        "curve": curve(events),
    }


def curve(events: list[Event]) -> list[tuple[float, float, float]]:
    """(seconds since 1970, merged tokens, held-out loss) of every evaluation."""
    tokens, found = 0.0, []
    for event in sorted(events, key=lambda event: event.time):
        if event.kind == "published":
            tokens = event.fields["tokens"]
        elif event.kind == "evaluated":
            found.append((event.time, tokens, event.fields["loss"]))
    return found


def loss_at(points: list[tuple[float, float, float]], tokens: float, *, among: int = 5) -> float:
    """The mean loss of the evaluations nearest to so many tokens: single ones are noisy."""
    near = sorted(points, key=lambda point: abs(point[1] - tokens))[:among]
    return sum(loss for _, _, loss in near) / len(near)


def draw(visiting: dict[str, Any], alone: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6.5), height_ratios=(2, 3))
    began = visiting["began"]
    for row, (region, spans) in enumerate(sorted(visiting["presence"].items())):
        bars = [((begin - began) / 60, (end - begin) / 60) for begin, end in spans]
        upper.broken_barh(bars, (row - 0.4, 0.8))
        upper.text(-0.2, row, region, ha="right", va="center", fontsize=8)
    upper.set_yticks([])
    upper.set_xlabel("minutes")
    upper.set_title(
        f"{visiting['joins']} joins, {visiting['leaves']} leaves: "
        f"{100 * visiting['share']:.1f} % of the compute that was there"
    )
    for name, points in (("with visitors", visiting["curve"]), ("steady", alone["curve"])):
        lower.plot(
            [tokens / 1e6 for _, tokens, _ in points], [loss for *_, loss in points], label=name
        )
    lower.set_xlabel("merged tokens, millions")
    lower.set_ylabel("held-out loss, nats per token")
    lower.set_ylim(top=min(4.0, lower.get_ylim()[1]))
    lower.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def once(path: Path, run: Any) -> dict[str, Any]:
    """The result in a file; runs what makes it if it is not there yet."""
    if not path.exists():
        result = run()
        path.write_text(json.dumps(result, indent=1) + "\n")
    return json.loads(path.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--visits", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/scavenging"))
    parser.add_argument("--png", type=Path, default=None)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.nice(5)
    visiting = once(
        options.out / "visiting.json",
        lambda: with_visitors(
            options.out / "visiting", options.seed, 60 * options.minutes, options.visits
        ),
    )
    average = visiting["possible"] / visiting["pace"] / visiting["seconds"]
    tokens = int(visiting["tokens"]["applied"])
    alone = once(
        options.out / "steady.json",
        lambda: steady(options.out / "steady", max(2, round(average)), tokens),
    )
    at = min(tokens, alone["curve"][-1][1])
    ours, theirs = loss_at(visiting["curve"], at), loss_at(alone["curve"], at)
    print(
        f"{visiting['joins']} joins and {visiting['leaves']} leaves "
        f"in {visiting['seconds'] / 60:.0f} min, "
        f"{average:.1f} regions on average: trained {visiting['trained']:,} of "
        f"{visiting['possible']:,} possible tokens ({100 * visiting['share']:.1f} %), books "
        f"balanced: {visiting['balanced']}\nheld-out loss at {at:,.0f} tokens: {ours:.4f} with "
        f"visitors, {theirs:.4f} with {alone['regions']} steady regions "
        f"({100 * (ours / theirs - 1):+.2f} %)"
    )
    if options.png:
        draw(visiting, alone, options.png)
    came = visiting["joins"] == visiting["leaves"] == visiting["scheduled"]
    reached = visiting["share"] >= SHARE and ours / theirs <= 1 + LOSS
    return 0 if came and reached and visiting["balanced"] else 1


if __name__ == "__main__":
    sys.exit(main())
