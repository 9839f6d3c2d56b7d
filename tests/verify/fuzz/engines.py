"""Hunts for bytes that a decoder takes badly, as long as one likes.

    python -m tests.verify.fuzz.engines                                  both engines, both targets
    python -m tests.verify.fuzz.engines --engine atheris --target frame --runs 50000
    python -m tests.verify.fuzz.engines --engine hypothesis --target message --first 12   resume
    python -m tests.verify.fuzz.engines --replay FILE --target frame     one input again

Inputs come in batches. A batch has a process of its own, so memory ends with it, and a
number that is its random seed, so a hunt goes on where it was ended. What atheris learns
(inputs that reach new code) is kept in build/fuzz and is where the next batch begins.

From its first input on a batch may use 64 MiB of address space more than it has: what a
decoder asks for beyond that fails at once, also when it is never touched.

Ends with 1 if a target failed; the input is then in build/fuzz.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import ROOT

KEPT = ROOT / "build" / "fuzz"
ENGINES = ("hypothesis", "atheris")
TARGETS = ("frame", "message")
BATCH = 50_000
AT_ONCE = 100
"""hypothesis remembers the draws of a run to draw none twice: short runs need little memory."""

ROOM_BYTES = 64 << 20
LONGEST_INPUT = 4096

COMPILED = (
    "merge.kernels",
    "wire.kernels.block",
    "wire.kernels.planes",
    "wire.kernels.sparse",
    "wire.kernels.sums",
)
"""Imported before atheris changes the bytecode of what is imported, which numba cannot read."""


class Watch:
    """A target that counts what became of its inputs and has little memory."""

    def __init__(self, name: str, keep: Path) -> None:
        from tests.verify.fuzz.seeds import SEEDS
        from tests.verify.fuzz.targets import TARGETS as functions

        self.name, self.keep, self._target = name, keep, functions[name]
        self.outcomes: Counter[str] = Counter()
        for data in SEEDS[name]():  # Compiles and imports whatever there is.
            assert self._target(data) != "refused" or data[:1] == b"\0", data
        self._before = _status("VmRSS")
        self._limited = False

    def __call__(self, data: bytes) -> None:
        if not self._limited:
            limit = _status("VmSize") + ROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            Path("/proc/self/clear_refs").write_text("5")  # The peak begins here.
            self._limited = True
        try:
            self.outcomes[self._target(data)] += 1
        except BaseException:
            self.keep.mkdir(parents=True, exist_ok=True)
            (self.keep / f"failed-{self.name}").write_bytes(data)
            raise

    def report(self) -> None:
        grown = (_status("VmHWM") - self._before) / (1 << 20)
        print(json.dumps({"outcomes": self.outcomes, "grown_mib": round(grown, 1)}), flush=True)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


def by_hypothesis(watch: Watch, batch: int, runs: int) -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from tests.verify.fuzz.shapes import SHAPES

    quietly = settings(
        max_examples=AT_ONCE,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

    def every(inputs: list[bytes]) -> None:
        for data in inputs:
            watch(data)

    turn = 0
    while watch.outcomes.total() < runs:
        trial = quietly(given(SHAPES[watch.name])(every))
        seed(batch << 20 | turn)(trial)()
        turn += 1
    watch.report()


def by_atheris(atheris: Any, watch: Watch, batch: int, runs: int) -> None:
    from tests.verify.fuzz.seeds import SEEDS

    corpus = watch.keep / f"corpus-{watch.name}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(SEEDS[watch.name]()):
        (corpus / f"seed-{number}").write_bytes(data)
    options = [f"-seed={batch + 1}", f"-atheris_runs={runs}", f"-max_len={LONGEST_INPUT}"]
    options += [f"-artifact_prefix={watch.keep}/", "-verbosity=0", "-rss_limit_mb=0", "-timeout=60"]

    def counted(data: bytes) -> None:
        watch(data)
        if watch.outcomes.total() == runs:
            # Its alarm against endless inputs would go off while the interpreter ends.
            signal.setitimer(signal.ITIMER_REAL, 0)
            watch.report()

    atheris.Setup([sys.argv[0], *options, str(corpus)], counted)
    atheris.Fuzz()


def one_batch(engine: str, target: str, batch: int, runs: int, keep: Path) -> None:
    if engine == "atheris":
        atheris: Any = importlib.import_module("atheris")  # Not there for everybody.
        for name in COMPILED:
            importlib.import_module(f"diloco_cli.{name}")
        with atheris.instrument_imports(include=["diloco_cli"]):
            watch = Watch(target, keep)
        by_atheris(atheris, watch, batch, runs)
    else:
        by_hypothesis(Watch(target, keep), batch, runs)


def hunt(engine: str, target: str, first: int, runs: int, keep: Path = KEPT) -> bool:
    """Runs batch after batch; says whether all of them were fine."""
    outcomes: Counter[str] = Counter()
    most, began, batches = 0.0, time.monotonic(), -(-runs // BATCH)
    for batch in range(first, batches):
        size = min(BATCH, runs - batch * BATCH)
        command = [sys.executable, "-m", "tests.verify.fuzz.engines", "--batch", str(batch)]
        command += ["--engine", engine, "--target", target, "--runs", str(size)]
        command += ["--keep", str(keep)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith('{"outcomes"')]
        if done.returncode or not found:
            print(done.stderr[-4000:])
            print(f"FAILED: {engine} {target}, batch {batch} (exit {done.returncode})")
            print(f"  again: {' '.join(command[1:])}\n  input: {keep}/failed-{target}", flush=True)
            return False
        told = json.loads(found[-1])
        outcomes.update(told["outcomes"])
        most = max(most, told["grown_mib"])
        words = ", ".join(f"{count} {word}" for word, count in sorted(outcomes.items()))
        print(
            f"{engine:10} {target:8} batch {batch + 1} of {batches}: {outcomes.total()} inputs, "
            f"{words}; +{most:.0f} MiB, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verify.fuzz.engines")
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs of each")
    parser.add_argument("--first", type=int, default=0, help="batch to begin with")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder for what is found")
    parser.add_argument("--batch", type=int, help="this batch alone, in this process")
    parser.add_argument("--replay", type=Path, help="one input, in this process")
    asked = parser.parse_args(arguments)
    engines, targets = asked.engine or ENGINES, asked.target or TARGETS

    if asked.replay:
        watch = Watch(targets[0], asked.keep)
        watch(asked.replay.read_bytes())
        watch.report()
        return 0
    if asked.batch is not None:
        one_batch(engines[0], targets[0], asked.batch, asked.runs, asked.keep)
        return 0
    fine = [hunt(e, t, asked.first, asked.runs, asked.keep) for e in engines for t in targets]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    sys.exit(main())
