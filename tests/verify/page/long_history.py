"""The page of a run of a million outer steps: python -m tests.verify.page.long_history

A real server with the history of such a run, and one with none; a real Chromium opens both.
Printed beside their limits: time until the page is shown, bytes that it took, and how much more
memory the server with the history holds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from diloco_cli.observe.history import History
from diloco_cli.server.history import NAME
from tests.observe.documents import make_status
from tests.observe.page.browser import started
from tests.observe.page.played_run import PlayedRun

STEPS = 1_000_000
SECONDS_A_STEP = 3.0
EVERY = 250
"""Outer steps between two samples of the made-up run; its evaluations are as often."""
LIMITS = {"seconds": 1.0, "bytes": 2e6, "memory": 20e6}


def long_history() -> bytes:
    """What a server would have kept of such a run of eight regions."""
    history = History(2)
    names = ["iowa", "paris", "tokyo", *(f"region-{number}" for number in range(5))]
    for step in range(0, STEPS, EVERY):
        regions = [
            {"name": name, "alive": True, "loss": 9.0 / (1 + step) ** 0.1, "tokens_per_second": 9e4}
            for name in names
        ]
        history.sample(
            SECONDS_A_STEP * step,
            make_status(
                outer_steps=step,
                tokens={"applied": 500.0 * step, "budget": 500 * STEPS},
                loss={"heldout": 10.0 / (1 + step) ** 0.1, "heldout_at": step},
                regions=regions,
            ),
        )
    return history.dump()


def measured(folder: Path, browser: Any, kept: bytes | None) -> dict[str, float]:
    """Opens the page of a run that has this history behind it."""
    folder.mkdir()
    if kept is not None:
        (folder / NAME).write_bytes(kept)
    with PlayedRun(folder, budget={"tokens": 500 * STEPS}) as run:
        for number in range(4):
            run.round(number % 2, loss=2.0)
        context = browser.new_context()
        tab = context.new_page()
        moved: list[int] = []
        tab.on("response", lambda answer: moved.append(len(answer.body())) if one(answer) else None)
        began = time.monotonic()
        tab.goto(run.url, wait_until="domcontentloaded")
        tab.wait_for_function("() => document.querySelector('#losses path.thick') !== null")
        seconds = time.monotonic() - began
        tab.evaluate("fetch('/v1/history').then(answer => answer.text())")
        tab.wait_for_timeout(100)
        context.close()
        memory = psutil.Process(run.pid).memory_info().rss
    return {"seconds": seconds, "bytes": float(sum(moved)), "memory": float(memory)}


def one(answer: Any) -> bool:
    """Whether an answer has an end; the stream of events has none."""
    return "/v1/events" not in answer.url


def measure(folder: Path, browser: Any) -> Mapping[str, float]:
    without = measured(folder / "without", browser, None)
    whole = measured(folder / "with", browser, long_history())
    return {**whole, "memory": whole["memory"] - without["memory"]}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, started() as browser:
        figures = measure(Path(folder), browser)
    load = psutil.getloadavg()[0]
    print(f"load {load:.1f} on {psutil.cpu_count()} cores")
    megabytes = {name: figures[name] / 1e6 for name in ("bytes", "memory")}
    print(f"page shown after     {figures['seconds']:.2f} s    limit 1 s")
    print(f"bytes, unpacked      {megabytes['bytes']:.2f} MB   limit 2 MB")
    print(f"memory of the server +{megabytes['memory']:.1f} MB  limit 20 MB")
    return int(any(figures[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
