"""What does it cost a run that it can be watched: the same run with and without, in turns.

    python -m tests.verify.trainers.run_cost --pairs 8

A quarter of the quickstart as real processes. With: curves and metrics are kept, and somebody has
the page open. Without: neither region nor server samples or writes any of it, and nobody looks.
The runs of a pair follow each other, every other pair in the other order. Counted are seconds of
an inner step, by the regions' own books, and seconds from a call to the acceptance of the answer;
the result is the median over the pairs of without ÷ with, and 1 is free. Needs an idle machine: a
run takes about 25 s on two cores, so eight pairs take 7 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco_cli.observe.events import Event, read_events
from tests import ROOT

GOAL = 0.99
PAGE_SECONDS = 2.0
"""Between two looks at the page: more often than it looks by itself."""
BARE = """
import os
if os.environ.get("DILOCO_UNWATCHED"):
    import asyncio
    from diloco_cli.observe.metrics_file import MetricsFile
    MetricsFile.note = lambda *given, **named: None
    try:
        from diloco_cli.server.history import HistoryRecorder
    except ImportError:
        pass
    else:
        async def rest(*given):
            await asyncio.Event().wait()
        async def nothing(*given):
            pass
        HistoryRecorder.note = lambda self, kind, **fields: self._note(kind, **fields)
        HistoryRecorder.run, HistoryRecorder.keep = rest, nothing
"""
"""What every process of a run without does when it starts."""


def measure(pairs: int, budget: int) -> dict[str, Any]:
    ratios: dict[str, list[float]] = {"step": [], "upload": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(BARE)
        for pair in range(pairs):
            order = (True, False) if pair % 2 else (False, True)
            found = {watched: one_run(Path(folder), pair, watched, budget) for watched in order}
            for name, known in ratios.items():
                known.append(found[False][name] / found[True][name])
            print(json.dumps({"pair": pair, **{n: round(r[-1], 4) for n, r in ratios.items()}}))
    return {
        "pairs": pairs,
        **{name: round(statistics.median(known), 4) for name, known in ratios.items()},
        "quartiles": {
            name: [round(each, 4) for each in statistics.quantiles(known, n=4)]
            for name, known in ratios.items()
            if len(known) > 1
        },
        "goal": GOAL,
        "load": round(os.getloadavg()[0], 1),
    }


def one_run(place: Path, pair: int, watched: bool, budget: int) -> dict[str, float]:
    """Seconds of an inner step, and of an upload, in one run."""
    folder = place / f"{pair}-{'with' if watched else 'without'}"
    environment = {**os.environ, "PYTHONPATH": str(place)}
    if not watched:
        environment["DILOCO_UNWATCHED"] = "1"
    over = threading.Event()
    reader = threading.Thread(target=_look, args=(folder, over), daemon=True)
    if watched:
        reader.start()
    try:
        subprocess.run(
            (
                *(sys.executable, "-m", "diloco_cli", "run"),
                *(str(ROOT / "pipelines" / "quickstart.yaml"), "--dir", str(folder)),
                *("--set", f"budget.tokens={budget}"),
            ),
            env=environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    finally:
        over.set()
    if watched:
        reader.join()
    kept = any(folder.glob("regions/*/metrics.jsonl"))
    assert kept == watched, f"{folder}: metrics are{'' if kept else ' not'} kept"
    return {"step": _step_seconds(folder), "upload": upload_seconds(_events(folder))}


def _look(folder: Path, over: threading.Event) -> None:
    """Has the page open."""
    while not over.wait(PAGE_SECONDS):
        with suppress(OSError, ValueError, KeyError):
            url = json.loads((folder / "server" / "address.json").read_bytes())["url"]
            for path in ("/", "/v1/history"):
                with urllib.request.urlopen(url + path, timeout=5) as answer:
                    answer.read()


def _step_seconds(folder: Path) -> float:
    reports = [json.loads(path.read_bytes()) for path in folder.glob("regions/*/progress.json")]
    return sum(each["worked"] for each in reports) / sum(each["step"] for each in reports)


def _events(folder: Path) -> Iterable[Event]:
    return read_events(folder / "events.jsonl")


def upload_seconds(events: Iterable[Event]) -> float:
    """The median time from a call to the acceptance of an answer to it."""
    called: dict[int, float] = {}
    took = []
    for event in events:
        fragment = int(event.fields.get("fragment", -1))
        if event.kind == "called":
            called[fragment] = event.time
        elif event.kind == "accepted" and fragment in called:
            took.append(event.time - called[fragment])
        elif event.kind == "closed":
            called.pop(fragment, None)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300_000)
    given = parser.parse_args()
    print(json.dumps(measure(given.pairs, given.tokens)))


if __name__ == "__main__":
    main()
