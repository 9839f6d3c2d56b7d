"""Every call × every kind of credential, over real TLS: the expected code in every cell."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.net.credentials import Credentials, load_credentials
from diloco_cli.server.http.calls import CALLS
from diloco_cli.wire.messages import EPOCH_HEADER, RUN_HEADER, WIRE_HEADER, WIRE_VERSION
from tests.security.tls_server import Guarded, client, mixed, refused_in_the_handshake, token_of

pytestmark = pytest.mark.live

DIGEST = "0" * 64

# Written by hand, not taken from the code: who may, and what the call answers once it is
# past the door. Region calls are made for paris; without a lease they end at its epoch.
EVERYBODY, REGION, READERS = {"upload", "read", "admin"}, {"upload"}, {"read", "admin"}
TABLE: dict[str, tuple[set[str], str, int]] = {
    "about": (EVERYBODY, "/v1/run", 200),
    "join": (REGION, "/v1/regions/paris/join", 400),
    "heartbeat": (REGION, "/v1/regions/paris/heartbeat", 400),
    "calls": (REGION, "/v1/regions/paris/calls?after=0&epoch=99", 412),
    "contribute": (REGION, "/v1/fragments/0/contributions/paris/0-1", 412),
    "parts": (REGION, f"/v1/fragments/0/contributions/paris/0-1/parts?frame={DIGEST}", 412),
    "contribute_part": (
        REGION,
        f"/v1/fragments/0/contributions/paris/0-1/parts/0?size=3&frame={DIGEST}&digest=crc32:0",
        412,
    ),
    "fragment": (EVERYBODY, "/v1/fragments/0?after=-1", 200),
    "version": (EVERYBODY, "/v1/fragments/0/versions/0", 200),
    "weights": (READERS, "/v1/weights", 200),
    "status": (EVERYBODY, "/v1/status", 200),
    "events": (READERS, "/v1/events", 200),
    "history": (EVERYBODY, "/v1/history", 200),
    "stop": ({"admin"}, "/v1/stop", 426),
    "amend": ({"admin"}, "/v1/amendments", 400),
    "amendments": (EVERYBODY, "/v1/amendments", 200),
    "metrics": (READERS, "/metrics", 200),
    "health": (set(), "/healthz", 200),
    "described": (EVERYBODY, "/openapi.json", 200),
    "page": (EVERYBODY, "/", 200),
}
OPEN = {"health"}

GOOD = {"region": "upload", "reader": "read", "admin": "admin", "other region": "upload"}
BAD = ("none", "unknown", "expired", "revoked", "other run", "role by another name")
SHUT_OUT = ("no certificate", "other CA", "expired certificate", "revoked certificate")


def test_the_table_has_a_row_for_every_call_and_no_other():
    assert set(TABLE) == {call.name for call in CALLS}


@pytest.fixture(scope="module")
def people(guarded: Guarded) -> dict[str, Credentials]:
    """One of each."""
    vault = guarded.vault
    paris = vault.identity("upload", "paris")
    expired = vault.made("upload", "iowa", days=-1)
    rome = vault.made("upload", "rome")
    stranger = vault.made("upload", "paris", credentials=vault.other)
    revoked = load_credentials(rome)
    vault.credentials.revoke("upload", "rome")
    guarded.until("the certificates have changed and are in use")
    return {
        "region": paris,
        "other region": vault.identity("upload", "tokyo"),
        "reader": vault.identity("read", "looker"),
        "admin": load_credentials(vault.credentials.folder / "admins" / "operator"),
        "none": mixed(paris, ""),
        "unknown": mixed(paris, "diloco.trial.paris." + "A" * 43),
        "expired": mixed(paris, token_of(expired)),
        "revoked": mixed(paris, token_of(rome)),
        "other run": mixed(paris, token_of(stranger)),
        "role by another name": mixed(paris, "paris"),
        "no certificate": Credentials(paris.token, paris.ca),
        "other CA": Credentials(
            paris.token, paris.ca, stranger / "client.pem", stranger / "client.key"
        ),
        "expired certificate": mixed(load_credentials(expired), paris.token),
        "revoked certificate": mixed(revoked, paris.token),
    }


def expected(call: str, who: str) -> int:
    may, path, answer = TABLE[call]
    if call in OPEN:
        return answer
    if who not in GOOD:
        return 401
    if GOOD[who] not in may or (who == "other region" and "paris" in path):
        return 403
    return answer


@pytest.mark.parametrize("who", [*GOOD, *BAD])
def test_every_call_answers_each_credential_as_written(
    guarded: Guarded, people: dict[str, Credentials], who: str
):
    found, wanted = {}, {}
    with client(guarded.url, people[who]) as asked:
        run = _run(guarded, people["admin"])
        for call in CALLS:
            headers = {WIRE_HEADER: str(WIRE_VERSION), RUN_HEADER: run, EPOCH_HEADER: "99"}
            if call.name == "stop":
                del headers[WIRE_HEADER]
            body: dict[str, Any] = {"content": b"{ }"} if call.sends else {}
            path = TABLE[call.name][1]
            with asked.stream(call.method, path, headers=headers, **body) as answer:
                found[call.name] = answer.status_code
                if answer.status_code in (401, 403):
                    assert answer.read() and set(answer.json()["error"]) >= {"code", "hint"}
                    assert ("www-authenticate" in answer.headers) == (answer.status_code == 401)
            wanted[call.name] = expected(call.name, who)
    assert found == wanted


@pytest.mark.parametrize("who", SHUT_OUT)
def test_without_a_good_certificate_there_is_no_connection(
    guarded: Guarded, people: dict[str, Credentials], who: str
):
    for call in CALLS:
        path = TABLE[call.name][1]
        assert refused_in_the_handshake(guarded.url, people[who], call.method, path), call.name
    assert not refused_in_the_handshake(guarded.url, people["region"])


@pytest.mark.parametrize(
    ("who", "code"),
    [
        ("none", "no-credential"),
        ("unknown", "unknown-credential"),
        ("expired", "expired-credential"),
        ("revoked", "revoked-credential"),
        ("other run", "unknown-credential"),
    ],
)
def test_a_refusal_says_which_it_is(
    guarded: Guarded, people: dict[str, Credentials], who: str, code: str
):
    with client(guarded.url, people[who]) as asked:
        error = asked.get("/v1/status").json()["error"]
    assert error["code"] == code
    if who == "other run":
        assert "of run 'another', this server runs 'trial'" in error["message"]


def test_a_browser_can_send_the_token_as_a_password(
    guarded: Guarded, people: dict[str, Credentials]
):
    reader = people["reader"]
    with client(guarded.url, mixed(reader, "")) as asked:
        assert asked.get("/", auth=("me", reader.token)).status_code == 200
        assert asked.get("/", auth=("me", "guess")).status_code == 401
        for odd in (
            "Basic",
            "Basic !!!",
            "Basic bWU=",
            "Basic é",
            "Bearer",
            "Digest x",
            "Bearer " + "a" * 9000,
        ):
            assert asked.get("/", headers={b"authorization": odd.encode()}).status_code == 401


def _run(guarded: Guarded, admin: Credentials) -> str:
    with client(guarded.url, admin) as asked:
        return asked.get("/v1/run").json()["run"]
