"""A private certificate authority for one run: who may open a connection at all.

    FOLDER/ca.pem, ca.key            the authority; the key never leaves this host
    FOLDER/server.pem, server.key    what the server shows; names from --host
    FOLDER/revoked.pem               certificates that no longer open the door
    FOLDER/tokens.json               who is who: hashes of tokens (`tokens.py`)
    FOLDER/regions/NAME/             what a region's host needs: ca.pem, client.pem,
    FOLDER/readers/NAME/             client.key, token
    FOLDER/admins/NAME/

Keys are P-256: every TLS library and browser knows it. All files are 0600.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco_cli.errors import SpecError, StoreError
from diloco_cli.system.files import disk_errors, keep_bytes

CA_DAYS = 3650
SOON_DAYS = 30
"""A certificate that ends within these days is made anew by the next `certs init`."""

ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names that every server certificate has, for who asks on the server's own host."""

_SKEW = datetime.timedelta(hours=1)
"""Hosts disagree about the time; a new certificate must hold for those that are behind."""


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,  # The only one that granian reads.
            serialization.NoEncryption(),
        )


def make_authority(run: str) -> KeyPair:
    """Makes a new authority; nothing it has not signed will be believed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"diloco {run}")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = _builder(name, name, key.public_key(), CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return KeyPair(builder.add_extension(own, critical=False).sign(key, hashes.SHA256()), key)


def make_server(authority: KeyPair, hosts: Iterable[str], days: int) -> KeyPair:
    """Makes the server's certificate for these names and addresses."""
    names = [_host(host) for host in dict.fromkeys((*hosts, *ALWAYS))]
    return _signed(authority, "diloco server", names, ExtendedKeyUsageOID.SERVER_AUTH, days)


def make_client(authority: KeyPair, run: str, role: str, name: str, days: int) -> KeyPair:
    """Makes the certificate with which somebody opens connections."""
    who = x509.UniformResourceIdentifier(f"diloco://{run}/{role}/{name}")
    return _signed(authority, f"{role} {name}", [who], ExtendedKeyUsageOID.CLIENT_AUTH, days)


def revocations(authority: KeyPair, serials: Iterable[int], number: int) -> bytes:
    """Lists the certificates that no longer count, in the form TLS libraries read."""
    now = _now()
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.certificate.subject)
    builder = builder.last_update(now - _SKEW).next_update(now + datetime.timedelta(days=CA_DAYS))
    key = authority.key.public_key()
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key), critical=False
    ).add_extension(x509.CRLNumber(number), critical=False)
    for serial in serials:
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(revoked.build())
    made = builder.sign(authority.key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


def keep_pair(pair: KeyPair, certificate: Path, key: Path) -> None:
    """Writes the key first: a certificate without its key would stop a server's start."""
    with disk_errors(key):
        keep_bytes(key, pair.key_pem)
    with disk_errors(certificate):
        keep_bytes(certificate, pair.pem)


def read_pair(certificate: Path, key: Path) -> KeyPair:
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
        made = read_certificate(certificate)
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(
            f"{key} cannot be used: {error}.",
            hint="Restore it from a copy; `diloco certs init`"
            " in another folder makes a new authority.",
        ) from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise StoreError(f"{key} is not a P-256 key.", hint="Was it made by `diloco certs`?")
    return KeyPair(made, private)


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(f"{path} is missing.", hint="`diloco certs init` makes it.") from None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path} is no certificate: {error}.",
            hint="Restore it, or delete it and run `diloco certs init` again.",
        ) from None


def why_unusable(key: Path, ca: Path, revoked: Path) -> str:
    """Says which of these files the HTTP server cannot load; empty if it can load all.

    It ends the process over a file that it cannot load, and takes less than OpenSSL does.
    """
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        return f"{key.name} holds no private key that can be read: {error}"
    if not _is_servable(private):
        return f"{key.name} holds a key that the server cannot use; it can use {SERVABLE}"
    try:
        x509.load_pem_x509_certificates(ca.read_bytes())
    except (OSError, ValueError) as error:
        return f"{ca.name} holds no certificate: {error}"
    try:
        x509.load_pem_x509_crl(revoked.read_bytes())
    except (OSError, ValueError) as error:
        return f"{revoked.name} holds no list of revoked certificates: {error}"
    return ""


SERVABLE = "P-256, P-384, Ed25519, and RSA with 2048, 3072 or 4096 bits"


def _is_servable(key: object) -> bool:
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1)
    if isinstance(key, rsa.RSAPrivateKey):
        return key.key_size in (2048, 3072, 4096)
    return isinstance(key, ed25519.Ed25519PrivateKey)


def names_of(certificate: x509.Certificate) -> list[str]:
    """Lists the names a certificate is good for."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in extension.value]


def days_left(certificate: x509.Certificate) -> float:
    return (certificate.not_valid_after_utc - _now()) / datetime.timedelta(days=1)


def fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def _signed(
    authority: KeyPair,
    common: str,
    names: Sequence[x509.GeneralName],
    purpose: x509.ObjectIdentifier,
    days: int,
) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    last = (issuer.not_valid_after_utc - _now()).days
    builder = _builder(_name(common), issuer.subject, key.public_key(), min(days, last))
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(issued_by, critical=False)
    return KeyPair(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW - datetime.timedelta(days=max(0, -days)))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(**true: bool) -> x509.KeyUsage:
    every = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: true.get(name, False) for name in every})


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not host or not host.isascii() or any(sign in host for sign in " /:@_"):
        raise SpecError(
            f"{host!r} is neither a host name nor an address.",
            hint="As in --host server.example or --host 203.0.113.7, without port or https://.",
        )
    return x509.DNSName(host)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
