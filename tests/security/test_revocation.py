"""Credentials that change while the server runs, and servers that must not run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from diloco_cli.errors import SpecError, StoreError
from diloco_cli.net.credentials import Credentials, load_credentials
from diloco_cli.server.access import authority
from diloco_cli.server.http.tls_reload import Certificates, refuse_open
from tests import ROOT, SMALL_SERVER
from tests.security.tls_server import (
    Guarded,
    Vault,
    client,
    refused_in_the_handshake,
    start,
)

pytestmark = pytest.mark.live


def patiently(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server whose certificates these tests change, one after the other."""
    server = start(tmp_path_factory.mktemp("changing"), None)
    yield server
    server.close()


CHANGED = "the certificates have changed and are in use"


def test_a_revoked_region_is_out_at_the_next_request_and_its_certificate_soon_after(
    running: Guarded,
):
    credentials = running.vault.credentials
    paris = running.vault.identity("upload", "paris")
    tokyo = running.vault.identity("upload", "tokyo")
    with client(running.url, paris, http2=False) as asked:
        assert asked.get("/v1/status").status_code == 200  # Issued after the start.
        told = running.said.count(CHANGED)
        credentials.revoke("upload", "paris")
        with suppress(httpx.TransportError):  # The connection itself may be gone already.
            assert asked.get("/v1/status").status_code == 401
        running.until(CHANGED, told + 1)
        patiently(lambda: refused_in_the_handshake(running.url, paris))
    with client(running.url, tokyo) as other:
        assert other.get("/v1/status").status_code == 200
    assert running.child.poll() is None  # The same process all along.


def test_a_stream_that_was_open_ends_with_the_revocation(running: Guarded):
    reader = running.vault.identity("read", "looker")
    ended, opened = threading.Event(), threading.Event()

    def follow() -> None:
        try:
            # Over HTTP/1.1: httpx's own HTTP/2 trips over a farewell.
            with (
                client(running.url, reader, http2=False) as asked,
                asked.stream("GET", "/v1/events") as lines,
            ):
                for _ in lines.iter_lines():
                    opened.set()
        except httpx.TransportError:
            pass
        ended.set()

    threading.Thread(target=follow, daemon=True).start()
    assert opened.wait(20)
    told = running.said.count(CHANGED)
    running.vault.credentials.revoke("read", "looker")
    assert ended.wait(30)
    running.until(CHANGED, told + 1)


def test_a_new_server_certificate_is_shown_without_a_restart(running: Guarded):
    credentials = running.vault.credentials
    operator = load_credentials(credentials.folder / "admins" / "operator")
    patiently(lambda: not refused_in_the_handshake(running.url, operator))
    before = _shown(running.url)
    told = running.said.count(CHANGED)
    credentials.create_missing("trial", ["localhost.example"], 30)
    running.until(CHANGED, told + 1)
    patiently(lambda: _shown(running.url) != before)
    with client(running.url, operator) as asked:
        assert asked.get("/v1/status").status_code == 200


def test_files_that_cannot_be_used_leave_the_old_ones_in_place(running: Guarded):
    credentials = running.vault.credentials
    operator = load_credentials(credentials.folder / "admins" / "operator")
    certificate = (credentials.folder / "server.pem").read_bytes()
    (credentials.folder / "server.pem").write_bytes(b"not a certificate")
    running.until("the new certificates are not used")
    with client(running.url, operator) as asked:
        assert asked.get("/v1/status").status_code == 200
    # Sound files in each other's place: OpenSSL takes them, the HTTP server would end over them.
    revoked = (credentials.folder / "revoked.pem").read_bytes()
    shutil.copy(credentials.folder / "ca.pem", credentials.folder / "revoked.pem")
    (credentials.folder / "server.pem").write_bytes(certificate)
    running.until("revoked.pem holds no list of revoked certificates")
    with client(running.url, operator) as asked:
        assert asked.get("/v1/status").status_code == 200
    (credentials.folder / "revoked.pem").write_bytes(revoked)
    (credentials.folder / "server.pem").unlink()  # As between two steps of somebody's script.
    running.until("No such file")
    told = running.said.count(CHANGED)
    credentials.create_missing("trial", ["localhost.example"], 30)
    os.chmod(credentials.folder / "server.key", 0o644)
    running.until("can be read by other users of this host")
    assert running.said.count(CHANGED) == told
    os.chmod(credentials.folder / "server.key", 0o600)
    running.until(CHANGED, told + 1)
    patiently(lambda: not refused_in_the_handshake(running.url, operator))
    with client(running.url, operator) as asked:
        assert asked.get("/v1/status").status_code == 200


def test_what_could_not_be_loaded_once_is_loaded_when_it_can_be(running: Guarded):
    credentials, told = running.vault.credentials, running.said.count(CHANGED)
    entries = credentials.tokens.read_bytes()
    credentials.tokens.unlink()
    os.utime(credentials.folder / "revoked.pem")
    running.until("tokens.json is missing")
    credentials.tokens.write_bytes(entries)
    credentials.tokens.chmod(0o600)
    running.until(CHANGED, told + 1)
    assert running.said.count("tokens.json is missing") == 1


def _shown(url: str) -> str:
    host, port = url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port)))


def test_only_tls_1_3_is_spoken(guarded: Guarded):
    context = guarded.vault.identity("upload", "paris").context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        httpx.Client(verify=context, trust_env=False) as asked,
        pytest.raises(httpx.ConnectError, match=r"(?i)alert|protocol"),
    ):
        asked.get(guarded.url)
    plain = guarded.url.replace("https:", "http:")
    with httpx.Client(trust_env=False) as asked, pytest.raises(httpx.TransportError):
        asked.get(plain)


def _other_key(folder: Path, curve: ec.EllipticCurve, password: bytes = b"") -> None:
    """Gives the server a key of its own choice, with a certificate that fits."""
    key = ec.generate_private_key(curve)
    issuer = authority.read_pair(folder / "ca.pem", folder / "ca.key")
    subject = authority._name("diloco server")
    built = authority._builder(subject, issuer.certificate.subject, key.public_key(), 30)
    pair = authority.KeyPair(built.sign(issuer.key, hashes.SHA256()), key)
    authority.keep_pair(pair, folder / "server.pem", folder / "server.key")
    if password:
        kind = serialization.BestAvailableEncryption(password)
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        (folder / "server.key").write_bytes(key.private_bytes(*form, kind))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "server.key").unlink(), "server.key is missing"),
        (lambda folder: (folder / "tokens.json").unlink(), "tokens.json is missing"),
        (lambda folder: (folder / "server.key").chmod(0o644), "chmod 600"),
        (lambda folder: (folder / "ca.pem").write_bytes(b"?"), "cannot be used"),
        (lambda folder: shutil.copy(folder / "ca.pem", folder / "revoked.pem"), "holds no list"),
        (lambda folder: shutil.copy(folder / "revoked.pem", folder / "ca.pem"), "no certificate"),
        (lambda folder: _other_key(folder, ec.SECP521R1()), "cannot use; it can use P-256"),
        (lambda folder: _other_key(folder, ec.SECP256R1(), b"secret"), "no private key"),
        (lambda folder: (folder / "tokens.json").write_bytes(b"?"), "cannot be read"),
    ],
)
def test_a_server_without_its_locks_does_not_open(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
):
    vault = Vault(tmp_path)
    spoil(vault.credentials.folder)
    certificates = Certificates(vault.credentials.folder)
    with pytest.raises((SpecError, StoreError), match=says) as refused:
        certificates.check()
        certificates.tokens("trial")
    assert refused.value.hint


def test_serving_stops_at_the_first_missing_lock(tmp_path: Path):
    vault = Vault(tmp_path)
    (vault.credentials.folder / "revoked.pem").unlink()
    server = {"listen": "0.0.0.0:0", "certs": str(vault.credentials.folder)}
    ended = subprocess.run(
        (sys.executable, *SMALL_SERVER, str(tmp_path), json.dumps({"server": server})),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "revoked.pem is missing" in ended.stderr and "diloco certs init" in ended.stderr


def test_an_address_that_turns_out_to_be_open_is_refused(tmp_path: Path):
    """The spec may say localhost, and this host's tables that it is elsewhere."""
    for host, kind in (("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)):
        with socket.socket(kind) as taken:
            taken.bind((host, 0))
            with pytest.raises(SpecError, match="can be reached by other machines"):
                refuse_open(taken, None)
            refuse_open(taken, Certificates(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        refuse_open(taken, None)


def test_a_token_is_never_said_where_it_can_be_heard():
    secret = Credentials(token="diloco.a.b.SECRET")
    for url in ("http://10.0.0.1:7350", "http://server.example"):
        with pytest.raises(SpecError, match="not encrypted") as caught:
            secret.check(url)
        assert "SECRET" not in str(caught.value)
    for url in ("https://10.0.0.1", "http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"):
        secret.check(url)
    assert "SECRET" not in repr(secret)
