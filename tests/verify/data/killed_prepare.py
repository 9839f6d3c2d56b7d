"""SIGKILL of `diloco data prepare` at random moments: the same bytes at the end?

python -m tests.verify.data.killed_prepare --kills 20

Prepares Python's own library as JSON lines, gzip, zstd, Parquet and text, once in peace and once
killed again and again, and compares every file of both folders.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from diloco_cli.data.hf_tokenizer import train_tokenizer
from diloco_cli.data.text import PythonSource
from tests.data.corpora import write_lines, write_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-verify-") as name:
        folder = Path(name)
        _write_corpus(folder)
        began = time.monotonic()
        _command(folder, "peace").wait()
        alone = time.monotonic() - began
        kills, resumed = _killed(folder, asked.kills, random.Random(asked.seed), alone)
        same = _content(folder / "peace") == _content(folder / "war")
    said = {"kills": kills, "resumed_from_progress": resumed, "same_bytes": same}
    print(json.dumps({**said, "seconds_in_peace": round(alone, 1)}))
    return 0 if same and kills else 1


def _write_corpus(folder: Path) -> None:
    texts = [path.read_text("utf-8", "replace") for path in PythonSource().find()]
    (folder / "tokenizer.json").write_text(train_tokenizer(texts[:100], 2048).to_str())
    parts = [texts[at::5] for at in range(5)]
    write_lines(folder / "in" / "a.jsonl", parts[0])
    write_lines(folder / "in" / "b.jsonl.gz", parts[1])
    write_lines(folder / "in" / "c.jsonl.zst", parts[2])
    write_table(folder / "in" / "d.parquet", parts[3])
    for number, text in enumerate(parts[4]):
        (folder / "in" / f"e{number:04d}.txt").write_text(text)


def _command(folder: Path, out: str) -> subprocess.Popen[bytes]:
    # Small batches and a flush after each: many places to die at.
    code = (
        "import sys; from diloco_cli.data import prepare as it\n"
        "usual = it.Preparation\n"
        "it.Preparation = lambda **how: usual(**how, letters=100_000, flush_every=0.2)\n"
        "from diloco_cli.cli.app import main; main(sys.argv[1:])"
    )
    arguments = [str(folder / "in"), "--tokenizer", str(folder / "tokenizer.json")]
    command = [sys.executable, "-c", code, "data", "prepare", *arguments]
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*command, "--out", str(folder / out)], stdout=quiet, stderr=quiet)


def _killed(folder: Path, most: int, dice: random.Random, alone: float) -> tuple[int, int]:
    """How often it was killed, and how often it then went on from where it had been."""
    kills, resumed, last = 0, 0, -1
    while True:
        process = _command(folder, "war")
        try:
            # Longer from time to time, so that it gets on.
            process.wait(dice.uniform(0.1, 0.5) * alone if kills < most else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            progress = folder / "war" / "progress.json"
            if progress.exists():
                now = json.loads(progress.read_bytes())["number"]
                resumed, last = resumed + (now > last >= 0), now
            continue
        assert process.returncode == 0, process.returncode
        return kills, resumed


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


if __name__ == "__main__":
    raise SystemExit(main())
