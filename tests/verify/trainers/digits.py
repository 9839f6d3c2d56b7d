"""Four regions with a quarter of the digits each against one region with all of them.

    python -m tests.verify.trainers.digits --tokens 4000000

Both train the same number of tokens. The goal: within one point of accuracy on held-out images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import ROOT

LOOP = str(ROOT / "pipelines" / "own-trainer" / "digits.py")
POINTS = 1.0


def accuracy(tokens: int, count: int, folder: Path) -> float:
    """Trains with so many regions; gives the accuracy of the pulled weights in percent."""
    first, out = folder / "init.safetensors", folder / f"weights-{count}.safetensors"
    subprocess.run([sys.executable, LOOP, "--describe", first], check=True, capture_output=True)
    regions = [
        {"name": f"r{each}", "trainer": {"command": ["{python}", LOOP, f"{each}/{count}"]}}
        for each in range(count)
    ]
    run = folder / f"run-{count}"
    changes = [f"budget.tokens={tokens}", f"regions={json.dumps(regions)}", f"model.file={first}"]
    changes += [f"sync.quorum={max(1, count // 2)}"]
    words = [word for change in changes for word in ("--set", change)]
    diloco = [sys.executable, "-m", "diloco_cli"]
    spec = "pipelines/own-trainer/digits.yaml"
    subprocess.run([*diloco, "run", spec, "--dir", run, *words], check=True, stdout=sys.stderr)
    subprocess.run([*diloco, "pull", run, "--out", out], check=True, stdout=sys.stderr)
    said = subprocess.check_output([sys.executable, LOOP, "--accuracy", out], text=True)
    return 100.0 * float(said.split()[1])


def main(tokens: int) -> dict:
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as place:
        one, four = (accuracy(tokens, count, Path(place)) for count in (1, 4))
    return {"tokens": tokens, "one": one, "four": four, "points": one - four, "goal": POINTS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    found = main(parser.parse_args().tokens)
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["points"] <= POINTS else 1)
