"""The audit: a line for what came, what left and who was turned away; a secret in none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.net.client import Client
from diloco_cli.net.options import ONCE, Options
from diloco_cli.server.http.audit import Audit
from diloco_cli.wire.frame import open_frame
from tests.security.tls_server import Guarded, client, mixed
from tests.server.harness import Region, make_settings

pytestmark = pytest.mark.live


def contribute(running: Guarded) -> tuple[str, int]:
    """Lets paris join, contribute and fetch; says its frame's digest and length."""
    paris = running.vault.identity("upload", "paris")
    with Client(running.url, Options(credentials=paris, retry=ONCE)) as api:
        about = api.run()
        region = Region("paris", make_settings(), about.run)
        region.join_through(api)
        frame = region.frame(0)
        said = open_frame(frame)
        base, clock = said.header.base, said.header.clock
        answer = api.submit(0, "paris", base, clock, frame, epoch=region.epoch)
        assert answer.fate in ("pending", "returned")
        api.whole(0, 0)
    return said.digest, len(frame)


def test_everything_that_moves_leaves_a_line_and_no_line_a_secret(own: Callable[..., Guarded]):
    running = own()
    vault = running.vault
    digest, size = contribute(running)
    paris, reader = vault.identity("upload", "paris"), vault.identity("read", "looker")
    with client(running.url, reader) as asked:
        weights = asked.get("/v1/weights")
        assert weights.status_code == 200
    with client(running.url, mixed(paris, "diloco.trial.paris.GUESSED-SECRET")) as asked:
        assert asked.get("/v1/status").status_code == 401
        asked.get("/v1/status?token=IN-THE-QUERY")
    with Client(running.url, Options(credentials=paris, retry=ONCE)) as api:
        api.run()
        with pytest.raises(SpecError):
            api.submit(0, "tokyo", 0, 1, b"x" * 100, epoch=1)
    lines = _until(running, lambda line: line["code"] == "other-region")
    by = {(line["who"], line["call"], line["outcome"]): line for line in lines}
    brought = next(line for line in lines if line["call"] == "contribute" and line["bytes_in"])
    assert (brought["who"], brought["digest"]) == ("upload:paris", digest)
    assert (brought["bytes_in"], brought["outcome"]) == (size, "accepted")
    taken = by["read:looker", "weights", "downloaded"]
    assert taken["bytes_out"] == len(weights.content) and taken["digest"] == "versions [0, 0]"
    assert by["upload:paris", "version", "downloaded"]["bytes_out"] > 0
    assert by["upload:paris", "join", "accepted"]["status"] == 200
    assert by["nobody", "status", "refused"]["code"] == "unknown-credential"
    assert by["upload:paris", "contribute", "refused"]["code"] == "other-region"
    assert (running.folder / "audit.jsonl").stat().st_mode & 0o777 == 0o600
    _no_secret_in(running)


def _until(running: Guarded, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The lines once a certain one is there: an answer may be read before its line is written."""
    deadline = time.monotonic() + 30
    while not any(map(wanted, lines := running.audit())):
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)
    return lines


def _no_secret_in(running: Guarded) -> None:
    """No file of the run, and nothing the server said, holds a token, a key or a guess."""
    secrets = [b"GUESSED-SECRET", b"IN-THE-QUERY", b"PRIVATE KEY"]
    secrets += [path.read_bytes().strip() for path in running.folder.rglob("token")]
    assert len(secrets) > 4
    certs = (running.folder / "certs", running.folder / "other")
    looked = 0
    for path in running.folder.rglob("*"):
        if path.is_file() and not any(home in path.parents for home in certs):
            data, looked = path.read_bytes(), looked + 1
            assert [secret for secret in secrets if secret in data] == [], path
    assert looked > 4


def test_the_files_are_bounded_and_turn(tmp_path: Path):
    audit = Audit(tmp_path / "audit.jsonl", most=2000, kept=3)
    for number in range(300):
        audit.write(call="contribute", number=number)
    audit.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(path.stat().st_size <= 2000 for path in files)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    newest = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[-1])
    assert newest["number"] == 299


def test_a_disk_that_refuses_the_line_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    audit = Audit(tmp_path / "nowhere" / "audit.jsonl")
    audit.write(call="join")
    audit.write(call="join")
    assert caplog.text.count("going on without it") == 1
