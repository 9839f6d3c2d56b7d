"""`diloco replay`, `backup`, `restore`: equal is 0, different is 5, nothing is overwritten."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml

from diloco_cli.assemble import build_terms, load_run, resolve, settings_of, spelled_out
from diloco_cli.run.copies import back_up, bring_back_certs
from diloco_cli.server.recovery.rebuild import read_copy
from diloco_cli.system.locks import FileLock
from diloco_cli.wire.digest import vector_digest
from diloco_cli.worker.mailbox import FolderOwner, Image, Mailbox
from tests.cli.harness import diloco, trained


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of which each fragment has two versions."""
    return trained(tmp_path, [0, 1, 0, 1])


def test_a_replay_of_what_the_journal_says_is_0_and_says_where_it_began(capsys, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out, _ = diloco(capsys, "replay", folder)
    assert code == 0
    assert "fragment 0  version 2" in out
    assert "equal (2 versions recomputed from the initial weights)" in out
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


def test_a_backup_is_whole_links_what_it_has_and_keeps_the_last_ones(capsys, folder, tmp_path):
    digest = json.loads(diloco(capsys, "replay", folder, "--format", "json")[1])["state"]
    to, copies = tmp_path / "copies", []
    for _ in range(3):
        code, out, message = diloco(capsys, "backup", folder, "--to", to, "--keep", 2)
        assert code == 0, message
        copies.append(Path(out.strip()))
    assert not copies[0].exists() and (to / "newest").resolve() == copies[2]
    assert not list(to.glob(".*")) and not (copies[2] / "server" / "lock").exists()
    states = [sorted((copy / "server").rglob("*.state")) for copy in copies[1:]]
    assert all(a.stat().st_ino == b.stat().st_ino for a, b in zip(*states, strict=True))
    journals = {(copy / "server" / "journal").stat().st_ino for copy in copies[1:]}
    assert len(journals) == 2, "a journal that is appended to is never linked"

    code, out, _ = diloco(capsys, "restore", to, "--dir", tmp_path / "again")
    assert code == 0 and digest in out


def test_a_backup_holds_the_certificates_and_brings_them_back(capsys, folder, tmp_path):
    certs = tmp_path / "certs"
    (certs / "server").mkdir(parents=True)
    (certs / "server" / "key.pem").write_text("secret")
    (certs / "server" / "key.pem").chmod(0o600)
    spec = folder / "spec.resolved.yaml"
    document = yaml.safe_load(spec.read_text())
    document["server"]["certs"] = str(certs)
    spec.write_text(yaml.safe_dump(document, sort_keys=False))
    copy = Path(diloco(capsys, "backup", folder, "--to", tmp_path / "copies")[1].strip())
    assert copy.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(certs)
    assert bring_back_certs(copy) == certs and bring_back_certs(copy) is None
    key = certs / "server" / "key.pem"
    assert key.read_text() == "secret" and key.stat().st_mode & 0o777 == 0o600


def test_a_file_that_goes_while_it_is_copied_begins_the_copy_anew(folder, tmp_path, monkeypatch):
    copied, gone = shutil.copy2, []

    def copy2(old, new, **more):
        if str(old).endswith(".delta") and not gone:
            gone.append(Path(old).read_bytes())
            os.unlink(old)  # As the server does when it is no longer needed.
        return copied(old, new, **more)

    monkeypatch.setattr(shutil, "copy2", copy2)
    copy = back_up(folder, tmp_path / "copies")
    names = {path.name for path in (folder / "server").rglob("*.delta")}
    assert gone and {path.name for path in (copy / "server").rglob("*.delta")} == names


def test_a_backup_says_what_it_cannot_do(capsys, folder, tmp_path):
    for words, sentence in (
        ([tmp_path, "--to", tmp_path / "x"], "nothing to back up"),
        ([folder, "--to", folder / "x"], "is inside"),
        ([folder, "--to", tmp_path / "x", "--every", "soon"], "no duration"),
    ):
        code, _, said = diloco(capsys, "backup", *words)
        assert code == 2 and sentence in said and "hint:" in said
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, _, said = diloco(capsys, "backup", folder, "--to", blocked / "x")
    assert code == 2 and f"{blocked} is a file" in said and "hint:" in said


def test_copies_of_another_run_are_not_removed(capsys, folder, tmp_path):
    (tmp_path / "other").mkdir()
    other, to = trained(tmp_path / "other", [0]), tmp_path / "copies"
    kept = Path(diloco(capsys, "backup", other, "--to", to)[1].strip())
    code, _, said = diloco(capsys, "backup", folder, "--to", to, "--keep", 1)
    assert code == 2 and "holds copies of another run" in said and "hint:" in said
    assert [path for path in to.iterdir() if path.is_dir() and not path.is_symlink()] == [kept]
    # A run that was rebuilt continues the one before, whose copies may go.
    assert diloco(capsys, "restore", other, "--dir", other, "--set-back")[0] == 0
    assert diloco(capsys, "backup", other, "--to", to, "--keep", 1)[0] == 0 and not kept.exists()


def test_a_full_disk_costs_a_backup_nothing_that_was_there(capsys, folder, tmp_path):
    to = tmp_path / "copies"
    whole = Path(diloco(capsys, "backup", folder, "--to", to)[1].strip())
    with open(folder / "server" / "journal", "ab") as journal:
        journal.write(bytes(100_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # As a disk with so much room.
    try:
        code, _, said = diloco(capsys, "backup", folder, "--to", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 5 and "cannot be written: File too large" in said and "--to" in said
    assert (to / "newest").resolve() == whole and not (to / ".copy.draft").exists()


def test_one_backup_at_a_time_and_one_that_was_killed_is_no_hindrance(capsys, folder, tmp_path):
    to = tmp_path / "copies"
    (to / ".copy.draft" / "server").mkdir(parents=True)  # What a SIGKILL leaves.
    with FileLock(to / "lock").held():
        code, _, said = diloco(capsys, "backup", folder, "--to", to)
    assert code == 2 and f"Process {os.getpid()} is making a copy" in said
    code, out, said = diloco(capsys, "backup", folder, "--to", to)
    assert code == 0, said
    assert not (to / ".copy.draft").exists() and diloco(capsys, "replay", out.strip())[0] == 0


def test_a_backup_that_is_asked_to_end_leaves_nothing_half_done(capsys, folder, tmp_path):
    to, copied = tmp_path / "copies", shutil.copy2

    def copy2(old, new, **more):
        signal.raise_signal(signal.SIGINT)
        return copied(old, new, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "copy2", copy2)
        for words, code in (((), 130), (("--every", "1h"), 0)):
            assert diloco(capsys, "backup", folder, "--to", to, *words)[:2] == (code, "")
    assert [path.name for path in to.iterdir()] == ["lock"]


def test_a_server_is_not_rebuilt_beside_the_spec_of_another_run(capsys, folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    spec = yaml.safe_load((folder / "spec.resolved.yaml").read_text())
    spec["sync"]["every"] += 1
    (other / "spec.resolved.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    code, _, said = diloco(capsys, "restore", folder, "--dir", other, "--set-back")
    assert code == 2 and "is the spec of another run" in said and not (other / "server").exists()


def test_pulled_weights_are_a_file_like_any_other_and_a_lost_journal_is_named(tmp_path, capsys):
    run, out = trained(tmp_path, [0]), tmp_path / "w.safetensors"
    before = os.umask(0o022)
    try:
        assert diloco(capsys, "pull", run, "--out", out)[0] == 0
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o644
    (run / "server" / "journal").unlink()
    code, _, told = diloco(capsys, "pull", run, "--out", out)
    assert code == 5 and "journal is missing" in told and "from a copy" in told


# A server that is lost or was set back


def region_folder(folder: Path, at: Path, name: str, *, other: bool = False) -> Path:
    """The folder of a region that holds what a server has published; or `other` weights."""
    spec = spelled_out(load_run(folder / "spec.resolved.yaml").spec)
    copy = read_copy(settings_of(spec, resolve(spec)), folder / "server", build_terms)
    mailbox = Mailbox(at / "regions" / name)
    mailbox.prepare()
    mailbox.write_identity(FolderOwner(f"{name}-owner", 3, copy.run, high=7, region=name))
    for number, slot in enumerate(copy.ledger.slots):
        weights = copy.state(number).published + np.float32(other)
        image = Image(
            slot.version, slot.merged, vector_digest(weights), weights, copy.run, slot.applied
        )
        mailbox.write_image(number, image)
    shutil.copy(folder / "spec.resolved.yaml", at)
    return at


def test_a_lost_server_is_rebuilt_from_region_folders(capsys, folder, tmp_path):
    lost = json.loads(diloco(capsys, "replay", folder, "--format", "json")[1])
    left, right = (region_folder(folder, tmp_path / name, name) for name in ("left", "right"))
    new = tmp_path / "new"
    code, _, said = diloco(capsys, "restore", "--from-regions", left, "--dir", new)
    assert code == 2 and "held by one region alone" in said and not new.exists()
    words = ("restore", "--from-regions", left, right, "--dir", new, "--format", "json")
    code, out, said = diloco(capsys, *words)
    assert code == 0 and "--set server.certs=certs --set server.listen=0.0.0.0:0" in said
    found = json.loads(out)
    assert found["was"] == lost["run"] != found["run"] and found["record"] == 10**9 + 1
    assert found["holders"] == [["left", "right"]] * 2 and found["momentum"] == ["fresh"] * 2
    assert [each["version"] for each in found["fragments"]] == [2, 2]
    code, _, said = diloco(capsys, *words)
    assert code == 2 and "server exists already" in said
    code, out, _ = diloco(capsys, "replay", new, "--format", "json")
    assert code == 0 and json.loads(out)["state"] == found["state"]


def test_a_copy_as_new_as_the_weights_keeps_the_momentum(capsys, folder, tmp_path):
    lost = json.loads(diloco(capsys, "replay", folder, "--format", "json")[1])
    left, new = region_folder(folder, tmp_path / "left", "left"), tmp_path / "new"
    words = ("restore", "--from-regions", left, "--and", folder, "--dir", new, "--format", "json")
    found = json.loads(diloco(capsys, *words)[1])
    assert found["momentum"] == ["kept"] * 2 and found["state"] == lost["state"]


def test_two_histories_stop_a_rebuild_and_both_are_shown(capsys, folder, tmp_path):
    left = region_folder(folder, tmp_path / "left", "left")
    right = region_folder(folder, tmp_path / "right", "right", other=True)
    code, _, said = diloco(
        capsys, "restore", "--from-regions", left, right, "--dir", tmp_path / "new", "--yes"
    )
    assert code == 5 and "two versions 2 of fragment 0" in said
    assert all(f"{name}, which last had news at 20" in said for name in ("left", "right"))
    assert "give the folders of that one only" in said and not (tmp_path / "new").exists()


def test_a_server_that_was_set_back_declares_the_loss_where_it_is(capsys, folder):
    lost = json.loads(diloco(capsys, "replay", folder, "--format", "json")[1])
    words = ("restore", folder, "--dir", folder, "--set-back", "--format", "json")
    code, out, said = diloco(capsys, *words)
    assert code == 0, said
    found = json.loads(out)
    assert found["was"] == lost["run"] != found["run"] and found["state"] == lost["state"]
    assert found["momentum"] == ["kept"] * 2 and (folder / "server.lost-1" / "journal").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (("a", "b"), "2 copies are given"),
        (("--from-regions", "--set-back", "a"), "--set-back is for a copy alone"),
        (("a", "--and", "b"), "--and is for --from-regions"),
        (("--from-regions", "a"), "is no region's folder"),
    ],
)
def test_what_cannot_be_meant_is_2(capsys, tmp_path, words, said):
    code, _, told = diloco(capsys, "restore", *words, "--dir", tmp_path / "new")
    assert code == 2 and said in told and "hint:" in told
