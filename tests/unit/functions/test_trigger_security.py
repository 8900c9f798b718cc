"""TLS and login of a function's trigger: attributes, annotations, files of secrets, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.config.kafka_security import KafkaSecurity
from headrace.config.model import HeadraceConfig
from headrace.errors import FunctionInvalid
from headrace.functions.load import load_function
from headrace.kafka.client.access import principal_of
from headrace_devkit.devcluster.certificates import Authority, KeyFiles
from yaml_table import table

PLAIN: dict[str, Any] = table(__file__, "plain")
NO_TLS: dict[str, Any] = {"tls": {"enable": False}}
CANARY = "canary-secret"
LOCKED = ec.generate_private_key(ec.SECP256R1()).private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
)


@pytest.fixture
def pem(tmp_path: Path) -> KeyFiles:
    """Make the authority `ca.pem` and a certificate with its key."""
    return Authority(tmp_path, "ca").issue("app")


def security_of(
    folder: Path,
    attributes: dict[str, Any] | None = None,
    annotations: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **spec: Any,
) -> KafkaSecurity | None:
    """Return what a trigger of a function file has; annotations are without their prefix."""
    named = {f"nuclio.io/kafka-{name}": value for name, value in (annotations or {}).items()}
    trigger = {"kind": "kafka-cluster", "attributes": {"topics": ["t"], "consumerGroup": "g", **(attributes or {})}}
    document = {"metadata": {"annotations": named}, "spec": {"handler": "m:h", "triggers": {"k": trigger}, **spec}}
    file = folder / "function.yaml"
    file.touch(0o600)
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return (
        load_function(file, HeadraceConfig.model_validate(config) if config else None).kafka_triggers[0].kafka.security
    )


def secured(folder: Path, *parts: Any, **spec: Any) -> KafkaSecurity:
    """Return the TLS and login of a trigger that has one."""
    found = security_of(folder, *parts, **spec)
    assert found
    return found


def refusal(folder: Path, *parts: Any, **spec: Any) -> str:
    """Return why a file is refused; no secret is in it, and a line is."""
    with pytest.raises(FunctionInvalid) as refused:
        security_of(folder, *parts, **spec)
    assert CANARY not in str(refused.value)
    assert f"{folder}/function.yaml:" in str(refused.value)
    return refused.value.description


def test_the_examples_of_nuclio_s_pages_log_in_over_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unchanged; that nothing is verified there is a warning.

    The earlier page has a login and no word on TLS: a password goes over TLS unless the file says otherwise.
    """
    sasl = {**PLAIN, "handshake": True, "mechanism": "SCRAM-SHA-256"}
    found = secured(tmp_path, {"sasl": sasl, "tls": {"enable": True, "insecureSkipVerify": True}})
    assert found.sasl and found.tls
    assert (found.effective_protocol, found.sasl.mechanism) == ("sasl_ssl", "SCRAM-SHA-256")
    assert (found.sasl.username, found.sasl.password.get_secret_value()) == ("nuclio", "s3rv3rl3ss")
    assert (found.tls.verify_certificate, found.tls.verify_host_name) == (False, False)
    assert "attributes.tls.insecureSkipVerify is true, so any server can pose as a broker" in caplog.text
    found = secured(tmp_path, {"sasl": PLAIN})
    assert (found.effective_protocol, found.sasl and found.sasl.mechanism) == ("sasl_ssl", "PLAIN")
    assert "attributes.tls: is not written, so the login uses TLS" in caplog.text
    assert secured(tmp_path, {"sasl": PLAIN, **NO_TLS}).effective_protocol == "sasl_plaintext"
    assert "attributes.tls.enable is false, so the network can read the records and the password" in caplog.text


@pytest.mark.parametrize("flat", ["lines", "@", " "])
@pytest.mark.parametrize("annotated", [False, True])
def test_flattened_certificates_are_unflattened(tmp_path: Path, pem: KeyFiles, flat: str, annotated: bool) -> None:
    """As annotations hold them: with `@` or blanks for line ends, which Nuclio does for two of the labels only."""
    files = {"caCert": tmp_path / "ca.pem", "accessKey": pem.key, "accessCertificate": pem.certificate}
    texts = {name: file.read_text() for name, file in files.items()}
    shown = {name: text if flat == "lines" else text.strip().replace("\n", flat) for name, text in texts.items()}
    names = {"caCert": "ca-cert", "accessKey": "access-key", "accessCertificate": "access-cert"}
    annotations = {names[name]: text for name, text in shown.items()}
    tls = (secured(tmp_path, {}, annotations) if annotated else secured(tmp_path, shown)).tls
    assert tls
    found = (tls.ca, tls.key.get_secret_value(), tls.certificate)
    assert [text.strip() for text in found] == [text.strip() for text in texts.values()]


def test_secrets_are_read_from_files_and_again_when_they_change(tmp_path: Path, pem: KeyFiles) -> None:
    """From `secretPath`, by an absolute path whatever `secretPath` is, and flattened as well."""
    mount, other = tmp_path / "mount", tmp_path / "other"
    mount.mkdir()
    (mount / "password").write_text("first\n")
    other.write_text((tmp_path / "ca.pem").read_text().strip().replace("\n", "@"))
    attributes = {"secretPath": str(mount), "sasl": {**PLAIN, "password": "password"}, "caCert": str(other)}
    found = secured(tmp_path, attributes)
    assert found.sasl and found.tls
    assert (found.sasl.password.get_secret_value(), found.tls.ca.count("\n") > 2) == ("first", True)
    assert {mount / "password", other} <= set(found.files)
    (mount / "password").write_text("second\n")
    now = found.current()
    assert now.sasl and now.sasl.password.get_secret_value() == "second"
    annotations = {"secret-path": str(mount), "ca-cert": str(tmp_path / "ca.pem"), "sasl-password": "password"}
    by_annotation = secured(tmp_path, {"sasl": {"enable": True, "user": "u"}}, annotations)
    assert by_annotation.sasl and by_annotation.sasl.password.get_secret_value() == "second"
    assert tmp_path / "ca.pem" in by_annotation.files


@pytest.mark.parametrize(
    ("attributes", "annotations", "problem"), table(__file__, "wrong_settings_name_their_line_and_the_fix")
)
def test_wrong_settings_name_their_line_and_the_fix(
    tmp_path: Path, pem: KeyFiles, attributes: dict[str, Any], annotations: dict[str, Any], problem: str
) -> None:
    """In the file's own names, and without the secret."""
    (tmp_path / "locked.key").write_bytes(LOCKED)
    (tmp_path / "locked.key").chmod(0o600)
    assert problem in refusal(tmp_path, attributes, annotations)


def test_a_file_with_a_secret_in_plain_text_must_be_private(tmp_path: Path) -> None:
    """As headrace.yaml; a reference to a file or variable is not refused."""
    (tmp_path / "p").write_text("x")
    (tmp_path / "function.yaml").touch()
    (tmp_path / "function.yaml").chmod(0o644)
    why = refusal(tmp_path, {"sasl": {**PLAIN, "password": CANARY}})
    assert "sasl.password" in why
    assert "chmod 600" in why
    assert secured(tmp_path, {"sasl": {**PLAIN, "password": "${file:p}"}}).files == [tmp_path / "p"]


KAFKA = {
    "bootstrap_servers": "a:9092, b:9092",
    "security": {"tls": {"ca": "-----BEGIN"}, "sasl": {"mechanism": "PLAIN", "username": "a", "password": "b"}},
}


@pytest.mark.parametrize(("attributes", "problem"), table(__file__, "settings_are_never_mixed"))
def test_settings_of_the_trigger_and_of_the_configuration_are_never_mixed(
    tmp_path: Path, pem: KeyFiles, attributes: dict[str, Any], problem: str
) -> None:
    """The trigger has all of its TLS and login, or none; nothing becomes weaker by an omission."""
    if problem:
        assert problem in refusal(tmp_path, attributes, {}, {"kafka": KAFKA})
    else:
        security_of(tmp_path, attributes, {}, {"kafka": KAFKA})


def test_a_login_alone_is_used_on_the_brokers_of_the_configuration(tmp_path: Path, pem: KeyFiles) -> None:
    """Brokers of its own get nothing of `kafka.security`."""
    kafka = HeadraceConfig.model_validate({"kafka": KAFKA}).kafka
    security_of(tmp_path, {"sasl": PLAIN, "caCert": "ca.pem"}, {}, {"kafka": KAFKA})
    cluster = load_function(tmp_path).kafka_triggers[0].kafka.cluster(kafka)
    assert (cluster.bootstrap_servers, principal_of(cluster)[0]) == (kafka.bootstrap_servers, "User:nuclio")
    security_of(tmp_path, {"brokers": ["c:9092"], **NO_TLS}, {}, {"kafka": KAFKA})
    cluster = load_function(tmp_path).kafka_triggers[0].kafka.cluster(kafka)
    assert (cluster.bootstrap_servers, cluster.security.effective_protocol) == ("c:9092", "plaintext")
    security_of(tmp_path, {}, {}, {"kafka": KAFKA})
    assert load_function(tmp_path).kafka_triggers[0].kafka.cluster(kafka) is kafka
