"""What a client says when certificates or tokens are wrong: both backends, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco_cli.errors import DilocoError, SpecError
from diloco_cli.net.client import Client
from diloco_cli.net.credentials import (
    Credentials,
    Untrusted,
    load_credentials,
    read_token,
    token_from_environment,
)
from diloco_cli.net.options import ONCE, Backend, Options, Retry
from diloco_cli.server.access import authority
from tests.security.tls_server import Guarded, Vault, mixed

pytestmark = pytest.mark.live

BACKENDS: tuple[Backend, ...] = ("pyreqwest", "httpx")


def asked(url: str, credentials: Credentials, backend: Backend) -> DilocoError:
    """Asks for something small and something large; both must fail alike."""
    options = Options(retry=Retry(tries=3), credentials=credentials, backend=backend)
    found = []
    for call in (Client.status, lambda client: client.whole(0, 0)):
        with Client(url, options) as client:
            client._run = None
            with pytest.raises(DilocoError) as raised:
                call(client)
        found.append(raised.value)
    assert {type(one) for one in found} == {type(found[0])}
    assert found[0].message == found[1].message
    return found[1]


@pytest.fixture(scope="module")
def spoiled(
    guarded: Guarded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Credentials]]:
    vault: Vault = guarded.vault
    paris = vault.identity("upload", "paris")
    stranger = vault.made("upload", "paris", credentials=vault.other)
    yield {
        "good": paris,
        "no certificate": Credentials(paris.token, paris.ca),
        "their CA": Credentials(paris.token, stranger / "ca.pem", paris.certificate, paris.key),
        "our CA": Credentials(
            paris.token, paris.ca, stranger / "client.pem", stranger / "client.key"
        ),
        "expired": load_credentials(vault.made("upload", "old", days=-1)),
        "no token": mixed(paris, ""),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("which", "kind", "says"),
    [
        ("no certificate", SpecError, "asks for a client certificate (none was shown)"),
        ("their CA", Untrusted, "no trusted authority has signed"),
        ("our CA", SpecError, "does not know who signed this certificate"),
        ("expired", SpecError, "says that this certificate has expired"),
        ("no token", SpecError, "needs a token, none was sent"),
    ],
)
def test_what_is_wrong_is_said_at_once_with_what_to_do(
    guarded: Guarded,
    spoiled: dict[str, Credentials],
    backend: Backend,
    which: str,
    kind: type[DilocoError],
    says: str,
):
    error = asked(guarded.url, spoiled[which], backend)
    assert type(error) is kind and says in error.message and error.hint
    assert error.exit_code == (4 if kind is Untrusted else 2)
    assert spoiled[which].token not in str(error) or not spoiled[which].token


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_by_another_name_is_not_believed(
    guarded: Guarded, spoiled: dict[str, Credentials], backend: Backend
):
    error = asked(guarded.url.replace("127.0.0.1", "127.0.0.2"), spoiled["good"], backend)
    # It listens on 127.0.0.1 only, so this is a server that is not there.
    assert error.exit_code == 4 and not isinstance(error, Untrusted)


def test_an_expired_server_and_one_of_other_names_are_told_apart(
    own: Callable[..., Guarded], tmp_path: Path
):
    running = own(server={"listen": "0.0.0.0:0"})
    folder = running.vault.credentials.folder
    paris = running.vault.identity("upload", "paris")
    other = running.url.replace("127.0.0.1", "127.0.0.2")
    for backend in BACKENDS:
        error = asked(other, paris, backend)
        assert isinstance(error, Untrusted)
        assert "for other names than 127.0.0.2" in error.message
        assert "--host 127.0.0.2" in (error.hint or "")
    signer = authority.read_pair(folder / "ca.pem", folder / "ca.key")
    expired = authority.make_server(signer, [], -1)
    authority.keep_pair(expired, folder / "server.pem", folder / "server.key")
    running.until("the certificates have changed and are in use")
    for backend in BACKENDS:
        error = asked(running.url, paris, backend)
        assert isinstance(error, Untrusted) and "has expired" in error.message


def test_both_backends_get_through_with_what_was_issued(
    guarded: Guarded, spoiled: dict[str, Credentials]
):
    for backend in BACKENDS:
        with Client(guarded.url, Options(credentials=spoiled["good"], backend=backend)) as client:
            assert client.status().name == "trial"
            assert client.whole(0, 0).header.version == 0


def test_another_regions_place_cannot_be_taken(guarded: Guarded, spoiled: dict[str, Credentials]):
    with Client(guarded.url, Options(credentials=spoiled["good"], retry=ONCE)) as client:
        about = client.run()
        with pytest.raises(SpecError, match="credential of region 'paris', not of 'tokyo'"):
            client.join(
                "tokyo",
                owner="x",
                boot=1,
                spec_digest=about.spec_digest,
                layout_digest=about.layout_digest,
            )


def test_tokens_come_from_files_of_their_owner_and_named_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "token"
    file.write_text("diloco.a.b.SECRET\n")
    file.chmod(0o644)
    with pytest.raises(SpecError, match="other users") as open_to_all:
        read_token(file)
    assert f"chmod 600 {file}" in str(open_to_all.value)
    file.chmod(0o600)
    assert read_token(file) == "diloco.a.b.SECRET"
    for bad in ("", "two words", "x" * 600, "ümlaut"):
        file.write_text(bad)
        with pytest.raises(SpecError) as refused:
            read_token(file)
        assert not bad or bad not in str(refused.value)
    with pytest.raises(SpecError, match="MY_TOKEN, which is not set"):
        token_from_environment("MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "diloco.a.b.SECRET")
    assert token_from_environment("MY_TOKEN") == "diloco.a.b.SECRET"
    with pytest.raises(SpecError, match="There is no folder"):
        load_credentials(tmp_path / "nowhere")
