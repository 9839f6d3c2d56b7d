"""What is between a record and its answer: a flush that is waited for, and never tried again."""

from __future__ import annotations

import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from diloco_cli.errors import DilocoError
from diloco_cli.net.client import Answer, Client
from diloco_cli.net.options import ONCE, Options
from diloco_cli.server.store.journal import read_journal
from diloco_cli.wire.frame import open_frame
from tests.verify.durability.killable_server import DEADLINE, Region, Stage  # pyright: ignore[reportAttributeAccessIssue]

pytestmark = pytest.mark.live


def decided(folder: Path) -> set[str]:
    """Digests of the frames that the journal speaks of, flushed or not."""
    with suppress(DilocoError):
        records = read_journal(folder / "server" / "journal").records
        return {r["receipt"]["digest"] for r in records if r["kind"] == "decided"}
    return set()


def test_no_answer_leaves_before_its_record_is_flushed(tmp_path):
    stage = Stage(tmp_path / "run")
    try:
        # The first flush is that of the join; the second one hangs until the server is killed.
        stage.start(failpoint="journal.written=stall:3600@2")
        url = stage.url()
        with Client(url, Options(retry=ONCE)) as client:
            region: Any = Region("paris", stage.settings, client.run().run)
            region.join_through(client)
            frame = region.frame(0)
            said: list[Answer | DilocoError] = []

            def send() -> None:
                try:
                    said.append(client.submit(0, "paris", 0, 1, frame, epoch=region.epoch))
                except DilocoError as error:
                    said.append(error)

            sender = threading.Thread(target=send)
            sender.start()
            stage.wait(lambda: said or open_frame(frame).digest in decided(stage.folder))
            for _ in range(5):  # Time enough for an answer that does not wait.
                assert httpx.get(f"{url}/healthz", timeout=20).status_code == 200
            assert not said, "an answer was there before the flush"
            stage.kill()
            sender.join(60)
        assert len(said) == 1 and isinstance(said[0], DilocoError)
    finally:
        stage.close()


def failing(trace: Path, **calls: str) -> tuple[str, ...]:
    """Lets some calls of the server's threads fail in the kernel; those after them succeed."""
    kernel = [word for call, how in calls.items() for word in ("-e", f"inject={call}:{how}")]
    only = ("-e", f"trace={','.join(calls)}")
    return ("strace", "-D", "-f", "--seccomp-bpf", "-y", "-o", str(trace), *only, *kernel)


def injected(trace: Path, call: str) -> list[int]:
    """Which of these calls failed, counted from 0; the last one is -1."""
    lines = trace.read_text().splitlines() if trace.exists() else []
    every = [line for line in lines if f"{call}(" in line and "/journal>" in line]
    return [number - len(every) for number, line in enumerate(every) if "INJECTED" in line]


def test_a_full_disk_is_asked_again_and_a_flush_that_failed_is_not(tmp_path):
    if not shutil.which("strace"):
        pytest.skip("needs strace")
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True)
    if tried.returncode:
        pytest.skip("needs the right to trace a process")
    stage = Stage(tmp_path / "run", tolerated=("refusal",))
    trace = tmp_path / "trace"
    refused, broken = "error=ENOSPC:when=8..9", "error=EIO:when=30"
    try:
        stage.start(cold=True, under=failing(trace, pwrite64=refused, fdatasync=broken))
        stage.add_clients()
        # Two writes of the journal find no room: nobody is told anything, and it goes on by
        # itself, until a flush fails. That one is final, though the next would succeed.
        assert stage.died(4 * DEADLINE) == 5, stage.last_words()
        assert "could not be made durable: Input/output error" in stage.last_words()
        assert len(injected(trace, "pwrite64")) == 2
        assert injected(trace, "fdatasync") == [-1], "no flush after the one that failed"
        assert stage.accepted > 8
        stage.check()
        stage.start()
        stage.url()
        stage.kill()
        stage.check()
    finally:
        stage.close()
