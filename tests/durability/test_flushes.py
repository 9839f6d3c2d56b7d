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
from diloco_cli.net.client import Answer, Server
from diloco_cli.net.transport import Retry
from diloco_cli.server.journal import read_journal
from diloco_cli.wire.frame import open_frame

from .stage import Region, Stage  # pyright: ignore[reportAttributeAccessIssue]

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
        with Server(url, retry=Retry(tries=1)) as client:
            region: Any = Region("paris", stage.recipe, client.run().run)
            about = region.join.model_dump(exclude={"wire"})
            region.epoch = client.join("paris", **about).epoch
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


def failing(trace: Path, call: str, error: str, when: str) -> tuple[str, ...]:
    """Lets calls of the kernel fail in the server's place; those after them succeed."""
    kernel = ("-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={when}")
    return ("strace", "-D", "-f", "--seccomp-bpf", "-y", "-o", str(trace), *kernel)


@pytest.fixture
def traced() -> None:
    if not shutil.which("strace"):
        pytest.skip("needs strace")
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True)
    if tried.returncode:
        pytest.skip("needs the right to trace a process")


@pytest.mark.usefixtures("traced")
def test_a_flush_that_fails_is_not_tried_again_and_ends_the_server(tmp_path):
    stage = Stage(tmp_path / "run", tolerated=("refusal",))
    trace = tmp_path / "trace"
    try:
        stage.start(cold=True, under=failing(trace, "fdatasync", "EIO", when="12"))
        stage.add_clients()
        assert stage.died() == 5
        assert "could not be made durable: Input/output error" in stage.last_words()
        calls = [line for line in trace.read_text().splitlines() if "fdatasync(" in line]
        failed = [number for number, line in enumerate(calls) if "INJECTED" in line]
        assert failed == [len(calls) - 1], "no flush of the journal after the one that failed"
        assert stage.accepted > 0
        stage.check()
        stage.start()
        stage.url()
        stage.kill()
        stage.check()
    finally:
        stage.close()


@pytest.mark.usefixtures("traced")
def test_records_that_a_full_disk_refuses_are_not_answered_for_and_written_later(tmp_path):
    stage = Stage(tmp_path / "run", tolerated=("refusal",))
    trace = tmp_path / "trace"
    try:
        # Of the journal's own thread: the twelfth write and those of the next tries.
        stage.start(cold=True, under=failing(trace, "pwrite64", "ENOSPC", when="12..13"))
        stage.add_clients()
        stage.wait(lambda: trace.exists() and trace.read_text().count("INJECTED") == 2)
        stage.until_accepted(8)  # By itself.
        assert stage.server and stage.server.code() is None
        stage.kill()
        stage.check()
    finally:
        stage.close()
