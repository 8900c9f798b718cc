"""Files of TLS to a backend that are not usable stop the start, in one paragraph that names them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.config.backend import ClientTls
from headrace.errors import ConfigError
from headrace.runtime.tls import ClientTlsFiles
from headrace_devkit.testing import ManualClock


@pytest.mark.parametrize("names", [("ca",), ("certificate", "key"), ("ca", "certificate", "key")])
def test_files_without_certificates_stop_the_start(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Whichever of them are named."""
    for name in names:
        (tmp_path / name).write_text("x")
    settings = ClientTls.model_validate({name: tmp_path / name for name in names})
    with pytest.raises(ConfigError, match=r"push backend\.tls: the files .* are not a certificate") as refused:
        ClientTlsFiles("push backend.tls", settings, ManualClock())
    assert all(str(tmp_path / name) in refused.value.description for name in names)


def test_a_locked_key_is_not_asked_for_at_a_terminal(tmp_path: Path) -> None:
    """It is refused."""
    key = ec.generate_private_key(ec.SECP256R1())
    locked = serialization.BestAvailableEncryption(b"canary")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    (tmp_path / "key").write_bytes(pem)
    files = ClientTls(certificate=tmp_path / "key", key=tmp_path / "key")
    with pytest.raises(ConfigError, match="are not a certificate, key and authorities that match"):
        ClientTlsFiles("x", files, ManualClock())


def test_without_files_the_system_decides_whom_to_trust() -> None:
    """Name and certificate of the server are checked all the same."""
    context = ClientTlsFiles("x", ClientTls(), ManualClock()).context
    assert context.check_hostname
    assert context.verify_mode.name == "CERT_REQUIRED"
    assert context.minimum_version.name == "TLSv1_2"
