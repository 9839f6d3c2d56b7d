"""What leaves the server's host is one region's and nobody else's; what is renewed is taken up."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.net.credential_watch import CredentialWatch
from diloco_cli.net.credentials import load_credentials
from diloco_cli.server.access.issue import CredentialFolder, bundle
from diloco_cli.server.access.tokens import FILE, TokenList
from tests.cli.harness import SPEC, diloco


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(SPEC)
    CredentialFolder(tmp_path / "certs").create_missing("tiny", [], 30)
    return tmp_path


def test_a_bundle_has_what_a_regions_host_needs_and_nothing_else(place: Path, capsys):
    assert diloco(capsys, "certs", "issue", "--region", "right")[0] == 0
    code, printed, told = diloco(capsys, "certs", "issue", "--region", "left", "--bundle", "l.tar")
    assert code == 0 and printed == "l.tar\n" and "nothing else" in told
    assert (place / "l.tar").stat().st_mode & 0o777 == 0o600
    with tarfile.open("l.tar") as archive:
        files = {entry.name: entry for entry in archive if entry.isfile()}
        archive.extractall(place / "there", filter="data")
    own = "tiny/certs/regions/left/"
    secrets = {own + name for name in ("ca.pem", "client.pem", "client.key", "token")}
    assert set(files) == {"tiny/run.yaml", "tiny/start-left.sh", *secrets}
    assert files[own + "token"].mode == 0o600 and files["tiny/start-left.sh"].mode == 0o755
    others = [(place / "certs" / name).read_bytes() for name in ("ca.key", "server.key")]
    others.append((place / "certs" / "regions" / "right" / "token").read_bytes())
    packed = (place / "l.tar").read_bytes()
    assert not any(secret.strip() in packed for secret in others)
    assert load_credentials(place / "there" / own).token
    code, _, told = diloco(capsys, "certs", "issue", "--region", "left", "--bundle", "l.tar")
    assert code == 2 and "l.tar exists already" in told


def test_a_region_that_the_spec_does_not_list_is_named(place: Path, capsys):
    code, _, told = diloco(capsys, "certs", "issue", "--region", "oslo")
    assert code == 0 and "lists left, right, not oslo" in told
    code, _, told = diloco(capsys, "certs", "issue", "--reader", "me", "--bundle", "me.tar")
    assert code == 2 and "for regions" in told and not (place / "me.tar").exists()


def test_a_renewed_credential_is_taken_up_when_it_is_whole(place: Path, caplog):
    caplog.set_level("INFO")
    folder = CredentialFolder(place / "certs")
    folder.issue("upload", "left", 30, renew=False)
    home = bundle(place / "certs", "upload", "left")
    first = load_credentials(home)
    watch = CredentialWatch(first, lambda: load_credentials(home))
    assert watch.look() is None
    folder.issue("upload", "left", 30, renew=True)
    assert watch.look() is None, "it may still be on its way"
    renewed = watch.look()
    assert renewed and renewed.token != first.token and watch.look() is None
    for name in ("client.key", "ca.pem"):
        whole = (home / name).read_bytes()
        caplog.clear()
        (home / name).write_text("half a file")
        assert [watch.look() for _ in range(3)] == [None] * 3
        assert f"the new credential is not used: {home}" in caplog.text
        (home / name).write_bytes(whole)
        assert any(watch.look() for _ in range(3))


@pytest.mark.parametrize("mode, accepted", [(0o400, True), (0o440, True), (0o644, False)])
def test_secrets_of_a_group_are_accepted_with_a_warning(place: Path, mode, accepted, caplog):
    token = place / "token"
    token.write_text("diloco.tiny.left.secret")
    os.chmod(token, mode)
    if accepted:
        assert load_credentials(None, token_file=token).token
        assert ("can be read by its group" in caplog.text) == (mode == 0o440)
    else:
        with pytest.raises(SpecError, match="read by other users"):
            load_credentials(None, token_file=token)


def test_why_a_regions_credential_opens_nothing_is_said_with_the_way_out(place: Path):
    now = [time.time()]
    folder = CredentialFolder(place / "certs")
    tokens = TokenList(place / "certs" / FILE, "tiny", clock=lambda: now[0])
    assert tokens.trouble_of("left").startswith("it has no credential; `diloco certs issue")
    folder.issue("upload", "left", 30, renew=False)
    assert tokens.trouble_of("left") == ""
    now[0] += 40 * 86400
    assert "its credential is expired since 20" in tokens.trouble_of("left")
    now[0] -= 40 * 86400
    folder.revoke("upload", "left")
    assert "its credential is revoked since 20" in tokens.trouble_of("left")


@pytest.mark.parametrize("script", ["start-server.sh", "start-left.sh"])
def test_a_start_script_without_diloco_says_so_and_runs_nothing(tmp_path: Path, capsys, script):
    assert diloco(capsys, "init", tmp_path / "new", "--regions", "left,right")[0] == 0
    (tmp_path / "bin").mkdir()
    for name in ("dirname", "sh"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [tmp_path / "new" / script, "http://127.0.0.1:1"],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "not on the PATH" in done.stderr
    assert "make install in a clone" in done.stderr and "not found" not in done.stderr
