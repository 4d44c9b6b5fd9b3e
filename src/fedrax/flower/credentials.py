"""Certificates for TLS between SuperLink and SuperNodes, and keys by which a SuperLink recognizes SuperNodes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedrax.errors import FedraxError
from fedrax.files import write_bytes

CA, CERTIFICATE, KEY = "ca.crt", "server.crt", "server.key"
"""Files of :func:`make_certificates`."""
VALID_DAYS = 730
"""Days for which certificates are valid."""
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names of this machine, for which every server certificate is valid: a SuperLink also connects to itself."""
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_CURVE = ec.SECP384R1()
"""P-384, as in Flower's documentation; SuperLinks accept keys on the NIST curves only."""


def make_certificates(directory: Path, hosts: Sequence[str]) -> None:
    """Make a certificate for a SuperLink, and the certificate of the authority that signed it.

    The authority's key is not stored, so that no further certificate can be signed with it.

    Args:
        directory: where to write ``ca.crt``, ``server.crt`` and ``server.key``, which only this user can read.
        hosts: host names and addresses under which SuperNodes reach the SuperLink, besides those of this machine.
    """
    authority, server = ec.generate_private_key(_CURVE), ec.generate_private_key(_CURVE)
    issuer = _named("fedrax deployment")
    root = (
        _builder(issuer, issuer, authority.public_key(), authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .sign(authority, hashes.SHA384())
    )
    names = list(dict.fromkeys((*LOCAL, *hosts)))
    certificate = (
        _builder(
            _named(names[len(LOCAL)] if len(names) > len(LOCAL) else "localhost"),
            issuer,
            server.public_key(),
            authority,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(map(_alternative_name, names))), critical=False)
        .sign(authority, hashes.SHA384())
    )
    write_bytes(directory / CA, root.public_bytes(serialization.Encoding.PEM))
    write_bytes(directory / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(
        directory / KEY,
        server.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def make_node_key(path: Path) -> None:
    """Make the key of a SuperNode: a private key at ``path``, and the public key beside it with the suffix ``.pub``."""
    key = ec.generate_private_key(_CURVE)
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    _write_private(path, key.private_bytes(encoding, serialization.PrivateFormat.OpenSSH, plain))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_bytes(path.with_name(f"{path.name}.pub"), public + b"\n")


def _named(name: str) -> x509.Name:
    """The name of an issuer or subject; common names have at most 64 characters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    """A certificate with names, validity and key identifiers, which strict verification requires."""
    now = datetime.now(UTC)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of other machines may be late
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(identifier, critical=False)
    )


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    """The use of a key: signatures of certificates, or of TLS handshakes."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    unused = dict.fromkeys((*others, "decipher_only"), False)
    return x509.KeyUsage(
        digital_signature=not sign_certificates, key_cert_sign=sign_certificates, crl_sign=sign_certificates, **unused
    )


def _alternative_name(host: str) -> x509.GeneralName:
    """A host as the name or address that clients compare with the one they connect to."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        name = host.encode("idna").decode()
    except UnicodeError:
        name = ""
    if not _HOST.fullmatch(name):
        raise FedraxError(f"{host!r:.80} is neither a host name nor an address")
    return x509.DNSName(name)


def _write_private(path: Path, content: bytes) -> None:
    """Write a new file that only this user can read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(content)
    except OSError as error:
        raise FedraxError(f"cannot write {path}: {error.strerror or error}") from error
