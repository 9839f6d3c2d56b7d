"""How long until the command answers?

`diloco --help` and `diloco validate` are typed by people and by scripts in loops, so they
load nothing that trains. Each is started several times; the fastest start says what the
command costs, the others what else the machine was doing. A bare interpreter, started in
turns with it, is the limit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from diloco_cli.bench.figure import Figure
from diloco_cli.run.scaffold import pipeline

GOAL_SECONDS = 0.4


def start_figures(*, times: int) -> list[Figure]:
    """Measures the starts of the light commands beside that of a bare interpreter."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        spec = Path(name) / "run.yaml"
        spec.write_text(pipeline("quickstart"))
        commands = {
            "diloco --help": ["-m", "diloco_cli", "--help"],
            "diloco validate": ["-m", "diloco_cli", "validate", str(spec)],
        }
        bare, taken = [], {title: [] for title in commands}
        for _ in range(times):
            bare.append(_seconds(["-c", "pass"]))
            for title, arguments in commands.items():
                taken[title].append(_seconds(arguments))
    return [
        Figure(title, min(seconds), "s", min(bare), GOAL_SECONDS, "value", lower=True)
        for title, seconds in taken.items()
    ]


def _seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - began
