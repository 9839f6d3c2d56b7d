"""Disks that are full, slow or broken, and rivals for one region: with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from diloco_cli.errors import DilocoError, LinkError
from diloco_cli.net.client import Client, FencedError
from diloco_cli.net.options import ONCE, Options
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.store.journal import read_journal
from diloco_cli.system.files import DiskFull
from diloco_cli.wire.frame import open_frame
from tests.verify.durability.killable_server import Region, Stage  # pyright: ignore[reportAttributeAccessIssue]

pytestmark = pytest.mark.live


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """Two megabytes where the server's folder will be."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def status(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/v1/status", timeout=20).json()


def test_a_full_disk_acknowledges_nothing_and_the_run_goes_on_when_there_is_room(tmp_path):
    stage = Stage(tmp_path / "run", tolerated=("refusal",))
    with small_disk(tmp_path / "run" / "server"):
        try:
            stage.start()
            url = stage.url()
            stage.add_clients()
            stage.until_accepted(4)
            ballast = tmp_path / "run" / "server" / "ballast"
            with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(4096))
            stage.wait(lambda: "Free some space" in json.dumps(status(url)))
            assert stage.server and stage.server.code() is None, "it waits, it does not die"
            with Client(url, Options(retry=ONCE)) as client:
                late: Any = Region("paris", stage.settings, client.run().run)
                late.clock = 1000
                with pytest.raises(LinkError, match="answered 507"):
                    client.submit(0, "paris", 0, 1001, late.frame(0), epoch=1)
            ballast.unlink()
            stage.until_accepted(6)  # By itself.
            stage.kill()
            stage.check()
        finally:
            stage.close()


def test_a_draft_takes_its_room_when_it_is_first_written_to_or_says_there_is_none(tmp_path):
    place = tmp_path / "small"
    with small_disk(place):
        kept, refused = Draft(place / "kept", length=1 << 20), Draft(place / "no", length=3 << 20)
        kept.write_pieces([b"x"])
        assert kept.allocated and 512 * (place / "kept").stat().st_blocks >= 1 << 20
        with pytest.raises(DiskFull, match="no room left"):
            refused.write_pieces([b"x"])
        for draft in (kept, refused):
            draft.discard()
        assert list(place.iterdir()) == []


def test_a_slow_disk_makes_everyone_wait_and_a_broken_one_ends_the_server(tmp_path):
    stage = Stage(tmp_path / "run", tolerated=("refusal",))
    try:
        stage.start(failpoint="journal.written=stall:0.2")
        stage.add_clients()
        stage.until_accepted(4)
        stage.kill()
        stage.check()
        # A flush that failed is never tried again: what the kernel dropped stays dropped.
        stage.start(failpoint="journal.written=error:EIO@4")
        assert stage.died() == 5
        assert "could not be made durable: Input/output error" in stage.last_words()
        stage.check()
        stage.start()
        stage.url()
        stage.kill()
        stage.check()
    finally:
        stage.close()


def test_sigterm_under_load_publishes_what_is_closing_and_loses_nothing(tmp_path):
    stage = Stage(tmp_path / "run", tolerated=("refusal",))
    try:
        stage.start()
        stage.add_clients()
        stage.until_accepted(6)
        stage.until_published()
        assert stage.server
        os.kill(stage.server.pid, signal.SIGTERM)
        assert stage.died() == 0
        found = stage.check()
        journal = read_journal(tmp_path / "run" / "server" / "journal")
        open_rounds = {r["fragment"]: r["kind"] for r in journal.records if r["kind"] in MOVES}
        assert "closed" not in open_rounds.values(), "a closed round is published before it leaves"
        summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
        assert summary["state"] == "stopped" and sum(line.version for line in found.lines)
    finally:
        stage.close()


MOVES = ("closed", "published", "dropped")


def test_a_zombie_is_fenced_and_a_recorded_upload_is_never_merged_twice(tmp_path):
    server = {"listen": "127.0.0.1:0", "lease": 1.0}
    stage = Stage(tmp_path / "run", server=server, tolerated=("refusal",))
    try:
        stage.start()
        url = stage.url()
        stage.add_clients()
        stage.until_accepted(8)
        stage.until_published()
        zombie = stage.clients[2]
        os.kill(zombie.pid, signal.SIGSTOP)
        with Client(url, Options(retry=ONCE)) as client:
            rival: Any = Region("paris", stage.settings, client.run().run, owner="another-disk")

            def joined() -> int:
                try:
                    return rival.join_through(client)
                except DilocoError as error:
                    assert "another worker holds this region" in error.message
                    return 0

            stage.wait(joined)
            assert rival.epoch == 2
            os.kill(zombie.pid, signal.SIGCONT)
            stage.wait(lambda: "Epoch 1 of paris is over" in told(stage, "paris"))
            replayed_uploads_change_nothing(stage, client, rival)
        stage.kill()
        records = read_journal(tmp_path / "run" / "server" / "journal").records
        second = [r for r in records if r["kind"] == "joined" and r["region"] == "paris"][1]
        after = records[records.index(second) :]
        sent = {open_frame(frame).digest for frame in rival.sent.values()}
        of_paris = [r["receipt"] for r in after if r["kind"] == "decided"]
        assert {r["digest"] for r in of_paris if r["region"] == "paris"} <= sent
    finally:
        for process in stage.clients:
            process.send_signal(signal.SIGCONT)
        stage.close()


def told(stage: Stage, name: str) -> str:
    return (stage.folder / f"{name}.told").read_text()


def replayed_uploads_change_nothing(stage: Stage, client: Client, rival: Any) -> None:
    """Sends one frame, waits until it is merged, and sends the recorded bytes again."""

    def send(frame: bytes, epoch: int) -> Any:
        about = open_frame(frame).header
        return client.submit(0, "paris", about.base, about.clock, frame, epoch=epoch)

    latest = client.latest(0, wait=0)
    assert latest
    rival.versions[0], rival.prev[0] = latest.version, latest.merged.get("paris", "")
    rival.clock = 1000
    frame = rival.frame(0)
    digest = open_frame(frame).digest
    if send(frame, 2).fate == "foreign":
        return  # The zombie's last frame was still waiting; it is the region's word then.

    def merged() -> bool:
        found = client.latest(0, wait=0)
        return bool(found) and found.merged.get("paris") == digest

    stage.wait(merged)
    again = send(frame, 2)
    assert (again.fate, again.recorded) == ("merged", True)
    with pytest.raises(FencedError):
        send(frame, 1)
