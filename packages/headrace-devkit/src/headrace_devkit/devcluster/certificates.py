"""Certificates of a secured dev cluster: an authority, its servers and users, and two that must be refused."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER_NAME: Final = "localhost"
"""The only name in the servers' certificates. The address 127.0.0.1 is left out, so that a mismatch can be tried."""
STORE_PASSWORD: Final = "store-password"
"""Pass phrase of the PKCS#12 stores."""
_VALID_DAYS: Final = 365


class KeyFiles(NamedTuple):
    """A certificate and its private key."""

    certificate: Path
    """PEM."""
    key: Path
    """PEM, PKCS#8 without a pass phrase; readable by its owner only."""
    store: Path
    """PKCS#12 with both and the authority's certificate, under `STORE_PASSWORD`; readable by its owner only."""


class Authority:
    """Signs certificates. Its key is in the folder, so that a later start signs with the same key."""

    def __init__(self, folder: Path, name: str) -> None:
        """Read `NAME.pem` and `NAME.key` of a folder, or make them."""
        self._folder = folder
        self.certificate = folder / f"{name}.pem"
        """PEM."""
        key_file = folder / f"{name}.key"
        if key_file.exists():
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            self._key, self._signer = key, x509.load_pem_x509_certificate(self.certificate.read_bytes())
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"Headrace dev {name}")
        builder = _builder(subject, subject, self._key, _VALID_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._signer = builder.sign(self._key, hashes.SHA256())
        write_file(key_file, _pem(self._key), 0o600)
        write_file(self.certificate, _pem(self._signer), 0o644)

    def issue(self, name: str, *, server: bool = False, days: int = _VALID_DAYS) -> KeyFiles:
        """Write a new certificate and its key into the folder, instead of those of the same name.

        Args:
            name: The name of the files and the common name, which Kafka takes as the name of the user.
            server: Whether it is of a server with the name `SERVER_NAME`, else of a client.
            days: How long it is valid; an expired one if negative.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(SERVER_NAME if server else f"{name}.users.local")]
        usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = _builder(_name(name), self._signer.subject, key, days)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        files = KeyFiles(*(self._folder / f"{name}.{suffix}" for suffix in ("pem", "key", "p12")))
        protection = serialization.BestAvailableEncryption(STORE_PASSWORD.encode())
        write_file(files.certificate, _pem(certificate), 0o644)
        write_file(files.key, _pem(key), 0o600)
        store = pkcs12.serialize_key_and_certificates(name.encode(), key, certificate, [self._signer], protection)
        write_file(files.store, store, 0o600)
        return files


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    begin = now - dt.timedelta(days=1 + max(0, -days) * 2)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _pem(item: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(item, x509.Certificate):
        return item.public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    return item.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def write_file(file: Path, data: bytes, mode: int) -> None:
    """Replace a file at once; its content is never readable by more than `mode` says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.touch(mode, exist_ok=False)
    draft.write_bytes(data)
    draft.replace(file)
