"""`diloco certs`: what it writes, that it can be said twice, and what a mistake looks like."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from diloco_cli.cli.app import main
from diloco_cli.errors import SpecError, StoreError
from diloco_cli.net.credentials import load_credentials
from diloco_cli.server.access.issue import CredentialFolder
from diloco_cli.server.access.tokens import TokenList, hash_of, read_entries
from diloco_cli.server.refusals import HttpRefusal


def diloco(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert diloco("init", ".", "--template", "smoke", "--regions", "paris,tokyo") == 0
    assert diloco("certs", "init", "--host", "server.example", "--host", "203.0.113.7") == 0
    return tmp_path


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_file_is_for_its_owner_alone_and_no_token_is_kept_in_clear(here: Path):
    assert diloco("certs", "issue", "--region", "paris") == 0
    files = everything(here / "certs")
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (here / "certs").rglob("*/")} <= {0o700}
    token = (here / "certs/regions/paris/token").read_text().strip()
    holders = [path for path, data in files.items() if token.encode() in data]
    assert holders == [here / "certs/regions/paris/token"]
    entries = read_entries(here / "certs/tokens.json")[1]
    assert hash_of(token) in {entry.sha256 for entry in entries}
    assert len(token.rpartition(".")[2]) >= 43


def test_saying_it_twice_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]):
    diloco("certs", "issue", "--region", "paris")
    before = everything(here / "certs")
    assert diloco("certs", "init", "--host", "server.example") == 0
    assert diloco("certs", "issue", "--region", "paris") == 0
    assert "--renew" in capsys.readouterr().err
    assert everything(here / "certs") == before


def test_another_name_makes_a_new_server_certificate_that_keeps_the_old_names(here: Path):
    assert diloco("certs", "init", "--host", "new.example") == 0
    shown = subprocess.check_output(
        [sys.executable, "-m", "diloco_cli", "certs", "show", "--format", "json"]
    )
    server = json.loads(shown)["certificates"][1]
    assert {"server.example", "203.0.113.7", "new.example", "localhost"} <= set(server["names"])


def test_a_renewal_leaves_a_day_and_a_revocation_none(here: Path):
    credentials = CredentialFolder(here / "certs")
    credentials.issue("upload", "paris", 30, renew=False)
    first = (here / "certs/regions/paris/token").read_text().strip()
    credentials.issue("upload", "paris", 30, renew=True)
    second = (here / "certs/regions/paris/token").read_text().strip()
    now = time.time()
    name = here.name if (here / "run.yaml").read_text().count(f"name: {here.name}") else None
    run = credentials.entries()[0]
    assert name in (None, run)

    def state(token: str, at: float) -> str:
        ring = TokenList(here / "certs/tokens.json", run, clock=lambda: at)
        try:
            return str(ring.who(token))
        except HttpRefusal as denied:
            return denied.code

    assert state(first, now) == state(second, now) == "upload:paris"
    assert state(first, now + 86_401 * 1.01) == "expired-credential"
    assert state(second, now + 86_401 * 1.01) == "upload:paris"
    assert len(credentials.revoke("upload", "paris")) == 2
    assert credentials.revoke("upload", "paris") == []
    assert state(first, now) == state(second, now) == "revoked-credential"


class Killed(BaseException):
    """Stands for the end of the process, which no handler catches."""


def killed_at(monkeypatch: pytest.MonkeyPatch, rename: int, work: Callable[[], object]) -> bool:
    """Does the work as a process that dies before one of its renames; False if it made fewer."""
    made, real = itertools.count(), os.replace

    def replace(source: Path, target: Path) -> None:
        if next(made) == rename:
            raise Killed
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        try:
            work()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("renew", [False, True])
def test_whatever_a_crash_leaves_of_a_bundle_the_next_one_is_whole(
    here: Path, monkeypatch: pytest.MonkeyPatch, renew: bool
):
    credentials = CredentialFolder(here / "certs")
    run, seen = credentials.entries()[0], 0
    for rename in itertools.count():
        name, home = f"paris-{rename}", here / f"certs/regions/paris-{rename}"
        if renew:
            credentials.issue("upload", name, 30, renew=False)
        issue = functools.partial(credentials.issue, "upload", name, 30)
        if not killed_at(monkeypatch, rename, functools.partial(issue, renew=renew)):
            break
        seen += 1
        issue(renew=False)
        mended = load_credentials(home)
        mended.context()  # Raises where the certificate and the key are not of one pair.
        caller = TokenList(here / "certs/tokens.json", run).who(mended.token)
        assert str(caller) == f"upload:{name}"
        assert issue(renew=False) is None
    assert seen >= 5


def test_init_makes_an_operator_anew_whose_renewal_was_cut_short_but_none_that_was_moved(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    credentials = CredentialFolder(here / "certs")
    run, home = credentials.entries()[0], here / "certs/admins/operator"
    assert credentials.create_missing(run, ["localhost"], 30) == []
    renew = functools.partial(credentials.issue, "admin", "operator", 30, renew=True)
    torn = 0
    for rename in itertools.count():
        if not killed_at(monkeypatch, rename, renew):
            break
        torn += bool(credentials.create_missing(run, ["localhost"], 30))
        caller = TokenList(here / "certs/tokens.json", run).who(load_credentials(home).token)
        assert str(caller) == "admin:operator"
    assert torn
    home.rename(here / "elsewhere")
    assert credentials.create_missing(run, ["localhost"], 30) == []


def test_an_expired_certificate_of_the_server_is_made_anew(here: Path):
    old = CredentialFolder(here / "certs")
    run = old.entries()[0]
    (here / "certs/server.pem").unlink()
    old.create_missing(run, [], -1)
    assert any("server's certificate" in line for line in old.create_missing(run, [], 30))
    assert old.create_missing(run, [], 30) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("issue",), "Name one of"),
        (("issue", "--region", "a", "--admin", "b"), "Name one of"),
        (("issue", "--region", "../x"), "cannot be a name"),
        (("issue", "--region", "a", "--dir", "nowhere"), "diloco certs init --dir nowhere"),
        (("revoke", "--region", "rome"), "Known here: admin operator"),
        (("init", "--host", "https://x"), "without port or https://"),
        (("show", "--dir", "nowhere"), "has no authority"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(
    here: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], says: str
):
    assert diloco("certs", *words) == 2
    said = capsys.readouterr().err
    assert says in said and "hint: " in said


def test_the_folder_of_another_run_is_refused(here: Path):
    with pytest.raises(SpecError, match="credentials of run"):
        CredentialFolder(here / "certs").create_missing("somebody-elses", [], 30)
    with pytest.raises(StoreError, match="has the credentials of run"):
        TokenList(here / "certs/tokens.json", "somebody-elses")


def test_show_says_no_secret(here: Path, capsys: pytest.CaptureFixture[str]):
    diloco("certs", "issue", "--region", "paris")
    diloco("certs", "revoke", "--region", "paris")
    capsys.readouterr()
    assert diloco("certs", "show") == 0
    said = capsys.readouterr().out
    assert "upload  paris: revoked" in said and "admin   operator: valid" in said
    entry = read_entries(here / "certs/tokens.json")[1][0]
    assert entry.sha256 not in said


def test_a_damaged_list_lets_nobody_in_and_sends_nobody_away(here: Path):
    path = here / "certs/tokens.json"
    ring = TokenList(path, CredentialFolder(here / "certs").entries()[0])
    token = (here / "certs/admins/operator/token").read_text().strip()
    assert ring.who(token).role == "admin"
    good = path.read_bytes()
    for bad in (b"{", b"[]", good.replace(b'"admin"', b'"root"'), None):
        path.unlink() if bad is None else path.write_bytes(bad)
        with pytest.raises(HttpRefusal) as denied:
            ring.who(token)
        assert denied.value.status == 503
    path.write_bytes(good)
    assert ring.who(token).role == "admin"


def test_a_list_that_was_read_badly_once_is_read_again_though_the_file_is_the_same(here: Path):
    path = here / "certs/tokens.json"
    ring = TokenList(path, CredentialFolder(here / "certs").entries()[0])
    token = (here / "certs/admins/operator/token").read_text().strip()
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    about = path.stat()
    with pytest.raises(HttpRefusal):
        ring.who(token)
    # For all that can be seen from outside it is the file that could not be read.
    path.write_bytes(good)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert ring.who(token).role == "admin"
