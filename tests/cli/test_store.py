"""`diloco replay` and `diloco restore`: equal is 0, different is 5, and nothing is overwritten."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from diloco_cli.assemble import load_run, recipe_of, resolve, spelled_out
from diloco_cli.cli.app import main
from diloco_cli.server.recovery.start import open_coordinator
from diloco_cli.spec.resolved import write_resolved
from tests.server.harness import Bench, close_server

SPEC = """
spec: 1
name: tiny
budget: {tokens: 100_000}
model: {kind: decoder, layers: 1, width: 32, heads: 2}
data: {kind: python-source}
inner: {batch: 2, sequence: 32}
regions: [{name: left}, {name: right}]
sync: {fragments: 2, every: 4, overlap: 1, grace: {kind: fixed, seconds: 5}}
server: {store: {kind: folder, whole: 1}}
"""


class RealBench(Bench):
    """The rig's bench, with a real model's weights."""

    def _open(self):
        weights = resolve(self.recipe.spec).model.init(0)
        return open_coordinator(
            self.recipe, self.folder / "server", lambda: weights, clock=self.clock
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of which each fragment has two versions."""
    (tmp_path / "run.yaml").write_text(SPEC)
    spec = spelled_out(load_run(tmp_path / "run.yaml").spec)
    write_resolved(spec, tmp_path / "run")

    async def train() -> None:
        bench = RealBench(tmp_path / "run", recipe_of(spec, resolve(spec)))
        await bench.join()
        for number in range(4):
            await bench.round(number % 2)
        await close_server(bench.server)

    asyncio.run(train())
    return tmp_path / "run"


def diloco(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def test_a_replay_of_what_the_journal_says_is_0_and_says_where_it_began(capsys, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out, _ = diloco(capsys, "replay", folder)
    assert code == 0
    assert "fragment 0  version 2" in out
    assert "equal (2 versions made again from the initial weights)" in out
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    _, document, _ = diloco(capsys, "replay", folder, "--format", "json")
    found = json.loads(document)
    assert found["state"] in out and [f["made"] for f in found["fragments"]] == [2, 2]
    _, document, _ = diloco(
        capsys, "replay", folder, "--to", found["record"] - 1, "--format", "json"
    )
    assert json.loads(document)["state"] != found["state"]
    assert diloco(capsys, "replay", folder, "--to", 9999)[0] == 2


def test_a_replay_that_finds_other_bits_is_5(capsys, folder):
    first, second = sorted((folder / "server/fragments/0").glob("v*.state"))[-2:]
    shutil.copy(first, second)
    code, _, said = diloco(capsys, "replay", folder)
    assert code == 5 and "v00000002.state is damaged" in said and "hint:" in said


def test_what_is_no_run_folder_is_2(capsys, folder, tmp_path):
    code, _, said = diloco(capsys, "replay", tmp_path)
    assert code == 2 and "is not the folder of a server" in said


def test_a_restored_copy_has_the_same_digest(capsys, folder, tmp_path):
    digest = json.loads(diloco(capsys, "replay", folder, "--format", "json")[1])["state"]
    copy, other = tmp_path / "copy", tmp_path / "other host" / "run"
    shutil.copytree(folder, copy)
    code, out, said = diloco(capsys, "restore", copy, "--dir", other)
    assert code == 0 and digest in out and "diloco serve" in said
    assert json.loads(diloco(capsys, "replay", other, "--format", "json")[1])["state"] == digest
    assert not list(other.rglob("*.draft")) and not (other / "server" / "lock").exists()
    code, _, said = diloco(capsys, "restore", copy, "--dir", other)
    assert code == 2 and "exists already" in said


def test_a_damaged_copy_is_not_restored(capsys, folder, tmp_path):
    journal = folder / "server" / "journal"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    code, _, said = diloco(capsys, "restore", folder, "--dir", tmp_path / "other")
    assert code == 5 and "is damaged" in said and not (tmp_path / "other").exists()


def test_a_folder_that_is_served_is_not_replayed(capsys, folder):
    import fcntl

    with open(folder / "server" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, said = diloco(capsys, "replay", folder)
    assert code == 2 and "in use by another server" in said


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything that a writer would change: inode, size, mode, time and content of each file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.stat()
        content = path.read_bytes() if path.is_file() else b""
        digest = hashlib.sha256(content).hexdigest()
        found[str(path)] = (stat.st_ino, stat.st_size, stat.st_mode, stat.st_mtime_ns, digest)
    return found


@pytest.mark.parametrize("command", ["pull", "status", "replay"])
def test_reading_a_stopped_run_changes_nothing(capsys, folder, tmp_path, command):
    server = folder / "server"
    # What a killed server leaves: a half-received upload, a torn record, its cache and address.
    (server / "payloads" / ".upload.1.0.draft").write_bytes(b"half")
    (server / "cache" / "0-v00000001.whole").write_bytes(b"frame")
    (server / "address.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": 1}))
    with (server / "journal").open("ab") as journal:
        journal.write(b"torn")
    folders = [server, *(path for path in server.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o500)
    before = snapshot(folder)
    out = ["--out", tmp_path / "weights.safetensors"] if command == "pull" else []
    code, _, message = diloco(capsys, command, folder, *out)
    for path in folders:
        assert path.stat().st_mode & 0o777 == 0o500
    assert snapshot(folder) == before
    assert code == (4 if command == "status" else 0), message
