"""Cuts the power at random moments; ends with 1 if a promise was broken.

    python -m tests.verify.durability.powercut --cuts 200

SIGKILL cannot find a missing fsync: the page cache outlives the process. So the server's
folder is an ext4 file system in a file, mounted through a loop device. At a random moment
all of the server's threads are stopped and the file is copied: it holds what has reached
the block device and nothing of what is only in memory. The copy is mounted, which replays
the file system's own journal as after a power cut, its content is compared with what the
clients had been told by then, and a server is started on it.

What this shows: whatever was acknowledged had been flushed, and the names with it. What it
does not: blocks that were half written when the power went (the copy is taken while no
write is under way, because a copy of a moving file would show an order of writes that no
disk makes), and disks that lie about their caches. The file system commits by itself only
every 300 s here, so that nothing becomes durable by luck.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.verify.durability.killable_server import Broken, Stage

DISK_BYTES = 24 << 20


def why_not() -> str:
    """Says why this machine cannot do it; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, to mount a file system from a file"
    if not shutil.which("mkfs.ext4"):
        return "needs mkfs.ext4"
    with tempfile.TemporaryDirectory() as folder:
        disk, place = Path(folder) / "disk", Path(folder) / "place"
        place.mkdir()
        try:
            make_disk(disk)
            with mounted(disk, place):
                return ""
        except subprocess.CalledProcessError as error:
            return f"needs loop devices: {error.stderr.decode(errors='replace').strip()}"


def make_disk(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(path)], check=True, capture_output=True)


@contextmanager
def mounted(disk: Path, place: Path) -> Iterator[None]:
    options = "loop,commit=300"
    mount = ["mount", "-t", "ext4", "-o", options, str(disk), str(place)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def cut_again_and_again(folder: Path, cuts: int, seed: int) -> str:
    """One run; raises Broken, or says what was seen."""
    rng, stage = random.Random(seed), Stage(folder / "run")
    disk, place = folder / "disk", folder / "run" / "server"
    make_disk(disk)
    place.mkdir(parents=True)
    with mounted(disk, place):
        try:
            stage.start()
            stage.add_clients()
            for number in range(cuts):
                stage.until_accepted(1)
                until = time.monotonic() + rng.uniform(0.0, 0.3)
                stage.wait(lambda until=until: stage.accepted and time.monotonic() >= until)
                _cut(stage, disk, folder)
                if number % 10 == 9:
                    print(f"{number + 1} of {cuts} cuts", file=sys.stderr, flush=True)
        except (Broken, AssertionError) as error:
            raise Broken(f"seed {seed}: {error}") from error
        finally:
            stage.close()
    return (
        f"{cuts} power cuts, {stage.accepted} acknowledged, lost 0, doubled 0, "
        f"{stage.made_again} versions made again, all equal"
    )


def _cut(stage: Stage, disk: Path, folder: Path) -> None:
    """Takes the power away from a copy of the disk and looks at what is left."""
    assert stage.server
    pid, after = stage.server.pid, folder / "after"
    os.kill(pid, signal.SIGSTOP)
    stage.wait(lambda: _all_stopped(pid))
    shutil.copyfile(disk, after)
    stage.listen()  # What they were told by now is what the copy must know.
    world = folder / "world"
    (world / "server").mkdir(parents=True, exist_ok=True)
    try:
        with mounted(after, world / "server"):
            stage.check(world / "server")
            _start_on(stage, world)
            stage.check(world / "server")
    finally:
        os.kill(pid, signal.SIGCONT)
        after.unlink()


def _start_on(stage: Stage, world: Path) -> None:
    """Starts a server on what is left, until it listens."""
    server = stage.second.server(world, stage.changes)
    address = world / "server" / "address.json"

    def listens() -> bool:
        assert server.code() is None, (world / "log").read_text()[-2000:]
        return address.exists() and f'"pid": {server.pid}' in address.read_text()

    try:
        stage.wait(listens)
    finally:
        os.kill(server.pid, signal.SIGKILL)
        stage.wait(lambda: server.code() is not None)


def _all_stopped(pid: int) -> bool:
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return all(state == "T" for state in states)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if why := why_not():
        print(f"skipped: {why}", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(prefix="diloco-cut-") as folder:
        try:
            print(cut_again_and_again(Path(folder), asked.cuts, asked.seed))
        except Broken as error:
            print(f"broken: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
