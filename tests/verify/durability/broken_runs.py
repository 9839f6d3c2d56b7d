"""Twelve broken runs, as whoever looks at them sees them.

    python -m tests.verify.durability.broken_runs [NAME…] --out build/broken

Each is broken for real: processes, disks, certificates. Then `diloco status` is asked again and
again until it, or the end of a log, has the words that name the cause. OUT/NAME.txt has what it
said then, and the last lines of every log; read them as a stranger would.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from diloco_cli import Region
from diloco_cli.launch.roles import work_role
from diloco_cli.launch.subprocesses import LocalProcess
from diloco_cli.net.credentials import load_credentials
from diloco_cli.region import NumpyWeights
from diloco_cli.run.copies import back_up, bring_back
from diloco_cli.server.access.issue import CredentialFolder, bundle
from diloco_cli.server.access.tokens import keep_entries
from diloco_cli.worker.agent.trainer_process import end_trainer
from diloco_cli.worker.mailbox import Mailbox
from tests.live.processes import Live
from tests.region.linear_loop import first

REGIONS = ("paris", "tokyo")
LOOP = [sys.executable, "-m", "tests.region.linear_loop"]
LINES = 4
"""Of each log that are shown."""


class BrokenRun:
    """A run of real processes, and what can be seen of it."""

    def __init__(self, folder: Path, patience: float = 300.0) -> None:
        self.folder, self.patience = folder, patience
        self.home = folder / "run"
        self.seconds: float | None = None
        """From the break until the words were to be seen."""
        self.kept = ""
        """What was to be seen, where it had to be looked at before the run was taken down."""
        self._runs: list[Live] = []

    def with_programs(self, *faults: str, **changes: Any) -> Live:
        """A run of numpy programs, which start in no time, each with its fault, if any."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = Region.describe(NumpyWeights(first()), self.folder / "init.safetensors")
        regions = [
            {
                "name": name,
                "pace": 2000,
                "trainer": {"command": [*LOOP, "sleep=0.01", *fault.split()]},
            }
            for name, fault in zip(REGIONS, faults or ("", ""), strict=True)
        ]
        model, sync = {"kind": "tensors", "file": str(file)}, {"fragments": 2, "every": 16}
        return self.with_trainers(*regions, **{"model": model, "sync": sync, **changes})

    def with_trainers(self, *regions: dict[str, Any], **changes: Any) -> Live:
        self._runs.append(Live(self.home, list(regions), **changes))
        return self._runs[-1]

    def started(self, run: Live, *, rounds: int = 2) -> tuple[LocalProcess, ...]:
        """The server and a worker of each region, once rounds are made with all of them."""
        server = run.serve()
        workers = [run.work(region.name) for region in run.spec.regions]
        run.wait_for(
            lambda: (
                run.status().outer_steps >= rounds
                and all(region.share for region in run.status().regions)
            ),
            server,
            *workers,
            seconds=self.patience,
        )
        return server, *workers

    def until_said(self, *words: str, log: str = "") -> None:
        """Waits until `status`, or a log, says what is wrong; both are what people look at."""
        began = time.monotonic()
        while True:
            seen = self.tail(log) if log else self.status()[1]
            if all(each in " ".join(seen.split()) for each in words):
                break
            if time.monotonic() > began + self.patience:
                raise AssertionError(f"{words} are not in:\n{seen}")
            time.sleep(0.2)
        self.seconds = time.monotonic() - began

    def status(self, *words: str) -> tuple[int, str]:
        """The exit code of `diloco status` and all that it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "diloco_cli", "status", str(self.home), *words],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "150"},
        )
        return done.returncode, done.stdout + done.stderr

    def tail(self, log: str, lines: int = LINES) -> str:
        path = self.home / "logs" / f"{log}.log"
        return "\n".join(path.read_text().splitlines()[-lines:]) if path.exists() else ""

    def picture(self) -> str:
        """All that a stranger has: `status`, the reasons in its JSON, the ends of the logs."""
        code, text = self.status()
        parts = [f"$ diloco status   → exit code {code}\n{text}"]
        with contextlib.suppress(ValueError):
            document = json.loads(self.status("--format", "json")[1].partition("\nerror:")[0])
            regions = document.get("regions") or []
            whys = {
                each["name"]: each.get("why") for each in regions if isinstance(each, dict)
            } or regions
            about = {key: document.get(key) for key in ("state", "why", "trouble")}
            parts.append(f"$ diloco status --format json\n{json.dumps({**about, 'regions': whys})}")
        for path in sorted((self.home / "logs").glob("*.log")):
            parts.append(f"$ tail -n {LINES} logs/{path.name}\n{self.tail(path.stem)}")
        return "\n\n".join(parts) + "\n"

    def end(self) -> None:
        for run in self._runs:
            run.launcher.stop(run.started, grace=0.0)
            for region in run.spec.regions:
                end_trainer(Mailbox(run.folder / "regions" / region.name))


def kill_host(run: Live, agent: LocalProcess, region: str) -> None:
    """Ends all of a region's processes at once, as a power cut does."""
    trainer = Mailbox(run.folder / "regions" / region).trainer_lock_holder()
    for pid in (agent.pid, trainer):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if pid:
                os.kill(pid, signal.SIGKILL)
    run.exit_code(agent)


def certified(broken: BrokenRun, **changes: Any) -> tuple[Live, CredentialFolder]:
    folder = CredentialFolder(broken.folder / "certs")
    folder.create_missing("tiny", [], 30)
    for name in REGIONS:
        folder.issue("upload", name, 30, renew=False)
    run = broken.with_programs(server={"certs": str(folder.folder), "lease": 3.0}, **changes)
    run.credentials = load_credentials(bundle(folder.folder, "admin", "operator"))
    return run, folder


# The twelve


def slow_line(broken: BrokenRun) -> None:
    run = broken.with_trainers(*({"name": name} for name in REGIONS), wire={"rate_limit": "2kbit"})
    broken.started(run)
    broken.until_said("slow line")


def full_disk(broken: BrokenRun) -> None:
    run = broken.with_programs()
    (run.folder / "server").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=192m", "tmpfs", str(run.folder / "server")]
    subprocess.run(mount, check=True)
    try:
        broken.started(run)
        with contextlib.suppress(OSError), open(run.folder / "server" / "filler", "wb") as filler:
            while True:
                filler.write(bytes(4096))
                filler.flush()
        broken.until_said("No space left")
        broken.kept = broken.picture()
    finally:
        broken.end()
        subprocess.run(["umount", "-l", str(run.folder / "server")], check=True)


def revoked(broken: BrokenRun) -> None:
    run, folder = certified(broken)
    broken.started(run)
    folder.revoke("upload", "tokyo")
    broken.until_said("tokyo", "revoked")


def expired(broken: BrokenRun) -> None:
    run, folder = certified(broken)
    broken.started(run)
    name, entries = folder.entries()
    ended = [replace(each, expires=1.0) if each.name == "tokyo" else each for each in entries]
    keep_entries(folder.tokens, name, ended)
    broken.until_said("tokyo", "expired")


def quarantined(broken: BrokenRun) -> None:
    run = broken.with_programs("", "wild")
    server, paris = run.serve(), run.work("paris")
    run.wait_for(lambda: run.status().outer_steps >= 20, server, paris, seconds=broken.patience)
    run.work("tokyo")
    broken.until_said("tokyo", "quarantine")


def compiling(broken: BrokenRun) -> None:
    large = {"kind": "decoder", "layers": 12, "width": 128, "heads": 4}  # It takes a while.
    run = broken.with_trainers({"name": "paris"}, model=large)
    run.serve()
    run.work("paris")
    broken.until_said("compiling")


def dead_host(broken: BrokenRun) -> None:
    run = broken.with_programs()
    _, _, tokyo = broken.started(run)
    kill_host(run, tokyo, "tokyo")
    broken.until_said("tokyo", "away", "its worker, its host or its line is down")


def wrong_data(broken: BrokenRun) -> None:
    missing = {"kind": "text", "files": [str(broken.folder / "corpus" / "*.txt")]}
    run = broken.with_trainers(*({"name": name} for name in REGIONS), data=missing)
    run.serve()
    run.work("paris")
    broken.until_said("corpus", log="paris")


def lost_quorum(broken: BrokenRun) -> None:
    run = broken.with_programs(sync={"fragments": 2, "every": 16, "quorum": 2})
    _, _, tokyo = broken.started(run)
    kill_host(run, tokyo, "tokyo")
    broken.until_said("1 of 2 regions needed are here")


def deleted_region_folder(broken: BrokenRun) -> None:
    run = broken.with_programs()
    broken.started(run)
    folder = run.folder / "regions" / "tokyo"
    shutil.rmtree(folder.rename(folder.with_name("deleted")), ignore_errors=True)
    broken.until_said("tokyo", "was deleted at about")


def deleted_server_folder(broken: BrokenRun) -> None:
    run = broken.with_programs()
    server, *_ = broken.started(run)
    folder = run.folder / "server"
    shutil.rmtree(folder.rename(folder.with_name("deleted")), ignore_errors=True)
    run.exit_code(server)
    broken.until_said("was deleted while the server ran", log="server")


def set_back(broken: BrokenRun) -> None:
    run = broken.with_programs()
    server, paris, tokyo = broken.started(run)
    copy = back_up(run.folder, broken.folder / "copies")
    steps, url = run.status().outer_steps, run.address["url"]
    run.wait_for(lambda: run.status().outer_steps >= steps + 6, server, seconds=broken.patience)
    os.kill(server.pid, signal.SIGKILL)
    run.exit_code(server)
    shutil.rmtree(run.folder / "server")
    bring_back(copy, run.folder)
    (run.folder / "server" / "address.json").write_text(json.dumps({"url": url, "pid": 0}))
    run.serve()
    for worker in (paris, tokyo):
        assert run.exit_code(worker, seconds=broken.patience) == 5
    broken.until_said("set back", log="paris")


def finished(broken: BrokenRun) -> None:
    run = broken.with_programs(budget={"tokens": 4000})
    server, paris, tokyo = run.serve(), run.work("paris"), run.work("tokyo")
    url = run.address["url"]
    for process in (paris, tokyo, server):
        if run.exit_code(process, seconds=broken.patience) != 0 and process is server:
            raise AssertionError(process.last_words())
    late = run.start(work_role(run.file, run.folder, "tokyo", url=url, cores=()))
    run.exit_code(late, seconds=broken.patience)
    broken.until_said("finished")


BREAKS: dict[str, Callable[[BrokenRun], None]] = {
    "slow line": slow_line,
    "full disk": full_disk,
    "revoked": revoked,
    "quarantined": quarantined,
    "compiling": compiling,
    "dead host": dead_host,
    "wrong data path": wrong_data,
    "expired certificate": expired,
    "lost quorum": lost_quorum,
    "deleted region folder": deleted_region_folder,
    "deleted server folder": deleted_server_folder,
    "set-back server": set_back,
    "finished": finished,
}


@contextlib.contextmanager
def broken_run(folder: Path, name: str, **options: Any) -> Iterator[BrokenRun]:
    """A run that is broken in the way of this name, and noticed."""
    broken = BrokenRun(folder, **options)
    try:
        BREAKS[name](broken)
        yield broken
    finally:
        broken.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BREAKS, []], metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.names or BREAKS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with broken_run(Path(folder), name) as broken:
                    text = broken.kept or broken.picture()
                    said = f"{name}: said after {broken.seconds:.1f} s"
            except AssertionError as error:
                text, said = str(error), f"{name}: NOT SAID"
        (chosen.out / f"{name.replace(' ', '-')}.txt").write_text(f"{said}\n\n{text}")
        print(said, flush=True)


if __name__ == "__main__":
    main()
