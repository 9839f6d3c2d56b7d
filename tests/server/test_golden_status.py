"""The status document and the summary keep their keys, their order and their figures.

Programs read them. A file of tests/golden changes only when a document is meant to change;
then `.venv/bin/python -m tests.server.test_golden_status` writes all of them.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from diloco_cli.observe.status import StatusDocument
from diloco_cli.server.build_status import build_status, build_summary
from tests import ROOT
from tests.server.harness import TEXT, Bench, make_settings, make_spec

URL = "http://127.0.0.1:7350"
NAMES = (
    "status-waiting",
    "status-training",
    "status-finished",
    "status-restarted",
    "summary-stopped",
    "summary-finished",
)
PATHS = {name: ROOT / "tests" / "golden" / f"{name}.json" for name in NAMES}


def text_of(document: StatusDocument) -> str:
    return json.dumps({**document.plain(), "run": "r"}, indent=2) + "\n"


async def documents(folder: Path) -> dict[str, str]:
    """A small run: nobody there yet, one region dead, stopped once, finished."""
    bench = Bench(folder, make_settings(make_spec(budget={"tokens": 1_300})))
    for region in bench.regions.values():
        region.order = TEXT
    texts: dict[str, str] = {}

    def keep(name: str) -> None:
        status = "status" in name
        texts[name] = text_of(
            build_status(bench.server, URL) if status else build_summary(bench.server)
        )

    await bench.join("paris")
    keep("status-waiting")
    await bench.join("iowa", "tokyo")
    await bench.round(0)
    held_out = {"versions": [1, 0], "loss": 5.5}
    await bench.beat("iowa", heldout=held_out, loss=5.25, tokens_per_second=640.0, pace=650.0)
    await bench.round(1)
    await bench.beat("tokyo", restarts=1, lost=64.0, worked=9.5, blocked=0.5)
    bench.clock.now += 11  # Longer than a lease: tokyo is dead.
    await bench.round(0, "iowa", "paris")
    await bench.call(1, "iowa", "paris")
    await bench.send("iowa", 1)
    devices = {"devices": 8, "tflops": 395.5, "mfu": 0.4, "device_memory": 61_000_000_000}
    devices["hosts"] = [{"host": 1, "work_seconds": 0.02, "step_seconds": 0.5}]
    await bench.beat(
        "iowa", 3.0, worked=20.0, loss=4.5, tokens_per_second=640.0, pace=650.0, **devices
    )
    await bench.beat("paris", training=False, why="starting the trainer")
    keep("status-training")
    bench.server.stop("stopped by a test")
    keep("summary-stopped")
    bench.restart()
    await bench.join()
    await bench.call(1)
    await bench.send("paris", 1)
    await bench.send("tokyo", 1)
    await bench.settle()
    await bench.round(0)
    for name in bench.regions:
        await bench.beat(name, drained=True)
    await bench.settle()
    keep("status-finished")
    keep("summary-finished")
    bench.restart()
    keep("status-restarted")
    return texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return asyncio.run(documents(tmp_path_factory.mktemp("golden")))


@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_what_it_was(name: str, texts: dict[str, str]):
    assert texts[name] == PATHS[name].read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, text in asyncio.run(documents(Path(folder))).items():
            PATHS[name].write_text(text)
