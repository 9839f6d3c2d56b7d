"""TLS certificates and the token that a client shows, and what TLS failures mean.

A bundle is a folder that `diloco certs issue` wrote:

    ca.pem       the authority to trust; without it, those that this host trusts
    client.pem   the client certificate, with client.key
    token        says which region or operator is asking

Both backends take the same `Credentials`. A failed handshake becomes one of two errors: a server
that cannot be trusted is `Untrusted`, which may be repaired while a region trains on; a client
certificate that the server refuses needs a person.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from diloco_cli.errors import DilocoError, LinkError, SpecError
from diloco_cli.system.private_files import check_private

PROBE_SECONDS = 3.0
LONGEST_TOKEN = 512


class Untrusted(LinkError):
    """The server shows a certificate that must not be trusted."""


@dataclass(frozen=True)
class Credentials:
    """What the client shows a server, and which authority it trusts."""

    token: str = field(default="", repr=False)
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    """Where the token was read, if it was in a file."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Where all of it is, for those who renew it."""
        every = (self.ca, self.certificate, self.key, self.token_file)
        return tuple(path for path in every if path)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def root_pem(self) -> bytes | None:
        return _read(self.ca) if self.ca else None

    @property
    def client_pem(self) -> bytes | None:
        if self.certificate is None or self.key is None:
            return None
        return _read(self.key) + _read(self.certificate)

    def context(self) -> ssl.SSLContext:
        """Makes the settings for Python's own TLS."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except (OSError, ssl.SSLError) as error:
            if self.ca is None:
                raise
            raise _unusable(self.ca, error) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.certificate and self.key:
            try:
                # With a password, though an empty one, OpenSSL asks no terminal for another.
                context.load_cert_chain(self.certificate, self.key, password="")
            except (OSError, ssl.SSLError) as error:
                raise _unusable(self.certificate, error) from None
        return context

    def check(self, url: str) -> None:
        """Refuses to send a token unencrypted to another host."""
        if self.token and not url.startswith("https://") and not _is_this_host(url):
            raise SpecError(
                f"{url} is not encrypted; a token sent there could be read in transit.",
                hint="Use the https:// URL that the server printed, or a tunnel to 127.0.0.1.",
            )


NOBODY = Credentials()
"""Enough for a server on the loopback address."""


def load_credentials(
    bundle: Path | None, *, token: str = "", token_file: Path | None = None
) -> Credentials:
    """Reads a bundle; `token` or `token_file` replaces the token in it."""
    if bundle is None:
        kept = None if token else token_file
        return Credentials(token=token or (read_token(kept) if kept else ""), token_file=kept)
    if not bundle.is_dir():
        raise SpecError(
            f"There is no folder {bundle} with a certificate and a token.",
            hint="`diloco certs issue` on the server's host makes it; copy it here, or name "
            "another one with --certs.",
        )
    certificate, key, ca = bundle / "client.pem", bundle / "client.key", bundle / "ca.pem"
    kept = token_file or bundle / "token"
    if token or not (token_file or kept.exists()):
        kept = None
    complete = certificate.exists() and key.exists()
    return Credentials(
        token=read_token(kept) if kept else token,
        token_file=kept,
        ca=ca if ca.exists() else None,
        certificate=certificate if complete else None,
        key=key if complete else None,
    )


def read_token(path: Path) -> str:
    """Reads a token from a file that only its owner may read."""
    try:
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not plain text"
        raise SpecError(
            f"The token in {path} cannot be read: {reason}.",
            hint="`diloco certs issue` writes it; token_file or DILOCO_TOKEN_FILE names it.",
        ) from None
    check_private(path)
    return checked_token(text, str(path))


def checked_token(text: str, where: str) -> str:
    """Returns a token that is valid in a header; errors never quote it."""
    if not text or len(text) > LONGEST_TOKEN or not text.isascii() or not text.isprintable():
        raise SpecError(
            f"What {where} holds is not a token.",
            hint="It is one line, as `diloco certs issue` wrote it.",
        )
    if " " in text:
        raise SpecError(f"The token in {where} has a space in it.", hint="Was it copied whole?")
    return text


def token_from_environment(variable: str) -> str:
    """Reads a token from the environment variable that the spec names."""
    if not (text := os.environ.get(variable, "").strip()):
        raise SpecError(
            f"The spec takes the token from ${variable}, which is not set.",
            hint=f"export {variable}=…, or use token_file.",
        )
    return checked_token(text, f"${variable}")


def handshake_error(
    url: str, credentials: Credentials, failure: BaseException
) -> DilocoError | None:
    """Says why the TLS handshake failed; None if the connection failed for another reason."""
    if not url.startswith("https://"):
        return None
    text = _with_causes(failure)
    if "CERTIFICATE_VERIFY_FAILED" in text or "invalid peer certificate" in text:
        return _server_certificate_error(url, text)
    if "alert" not in text:
        # In TLS 1.3 a refusal comes after the client's first request, whose failure may hide it.
        text = _read_alert(url, credentials)
    return _client_certificate_error(url, credentials, text)


def _server_certificate_error(url: str, text: str) -> Untrusted:
    host = urlsplit(url).hostname
    for signs, what, hint in (
        (
            ("expired",),
            "shows a certificate that has expired",
            "On the server's host: `diloco certs init`; no restart is needed. Is the clock of "
            "this host right?",
        ),
        (
            ("not yet valid", "NotValidYet"),
            "shows a certificate that is not valid yet",
            "Compare the clocks of both hosts.",
        ),
        (
            ("mismatch", "not valid for"),
            f"shows a certificate for other names than {host}",
            f"On the server's host: `diloco certs init --host {host}`, or use one of its names "
            "(`diloco certs show`).",
        ),
    ):
        if any(sign in text for sign in signs):
            return Untrusted(f"{url} {what}.", hint=hint)
    return Untrusted(
        f"{url} shows a certificate that no trusted authority has signed.",
        hint="Is it the right server, and ca.pem the one of this run? `diloco certs show` on the "
        "server's host; --certs names the folder with ca.pem.",
    )


_ALERTS = (
    (("certificate required", "CertificateRequired"), "asks for a client certificate"),
    (("certificate revoked", "CertificateRevoked"), "says that this certificate was revoked"),
    (("certificate expired", "CertificateExpired"), "says that this certificate has expired"),
    (
        ("unknown ca", "UnknownCA", "bad certificate", "BadCertificate", "DecryptError"),
        "does not know who signed this certificate",
    ),
    (("protocol version", "ProtocolVersion"), "speaks TLS 1.3 only"),
)


def _client_certificate_error(url: str, credentials: Credentials, text: str) -> SpecError | None:
    for signs, what in _ALERTS:
        if any(sign in text for sign in signs):
            shown = credentials.certificate or "none was shown"
            return SpecError(
                f"{url} {what} ({shown}).",
                hint="`diloco certs issue` on the server's host makes a new one; name its folder "
                "with --certs.",
            )
    return None


def _read_alert(url: str, credentials: Credentials) -> str:
    """Connects without sending a request, so that a TLS alert can be read."""
    parts = urlsplit(url)
    try:
        with (
            socket.create_connection(
                (parts.hostname or "", parts.port or 443), PROBE_SECONDS
            ) as plain,
            credentials.context().wrap_socket(plain, server_hostname=parts.hostname) as secure,
        ):
            secure.settimeout(PROBE_SECONDS / 3)
            with suppress(TimeoutError):
                secure.recv(1)
    except (OSError, ssl.SSLError, DilocoError) as error:
        return str(error)
    return ""


def _with_causes(failure: BaseException | None) -> str:
    """The texts of an error and its causes; backends put the reason at the far end."""
    texts = []
    while failure is not None and len(texts) < 8:
        texts.append(f"{failure} {getattr(failure, 'details', '')}")
        failure = failure.__cause__ or failure.__context__
    return " ".join(texts)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError | ssl.SSLError) -> SpecError:
    return SpecError(
        f"{path} cannot be used: {error.strerror or error}.",
        hint="Copy the whole folder that `diloco certs issue` made.",
    )


def _is_this_host(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
