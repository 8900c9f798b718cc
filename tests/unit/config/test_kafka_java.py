"""Security properties of Java's clients and light-4j's files in `kafka.properties` become `kafka.security`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.kafka_java import parse_jaas
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.load import load_config
from headrace_devkit.devcluster.certificates import Authority
from headrace_pipelines.connector import connector_options

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
TABLE = yaml.safe_load(Path(__file__).with_name("java.yaml").read_text())


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    app = Authority(folder, "ca").issue("app")
    (folder / "app.both").write_bytes(app.key.read_bytes() + app.certificate.read_bytes())
    return folder


def loaded(folder: Path, properties: dict[str, Any], environ: dict[str, str] | None = None) -> KafkaSecurity:
    """Return what `kafka.properties` with these, as a file of light-4j has them, becomes."""
    file = folder / "headrace.yaml"
    file.touch(0o600)
    file.write_text(yaml.safe_dump({"kafka": {"properties": {**properties, "client.rack": "a"}}}))
    config = load_config(file, environ or {})
    assert config.kafka.properties == {"client.rack": "a"}
    return config.kafka.security


def opened(security: KafkaSecurity) -> dict[str, Any]:
    """Return the settings that are set, with their secrets."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return value.get_secret_value() if hasattr(value, "get_secret_value") else value

    found: dict[str, Any] = plain(security.model_dump(exclude_unset=True))
    return found


LIGHT_4J = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "PLAIN",
    "sasl.jaas.config": f'{PLAIN} username="${{KAFKA_USER:app}}" password="${{KAFKA_PRODUCER_PASSWORD}}";',
    "ssl.endpoint.identification.algorithm": "",
    "ssl.truststore.location": "ca.pem",
    "ssl.truststore.password": "${KAFKA_PRODUCER_PASSWORD}",
    "ssl.protocol": "TLS",
}


def test_a_file_of_light_4j_is_taken_as_it_is(pki: Path) -> None:
    """A password is what the variable holds: its quotes and backslashes are no syntax of the line."""
    password = 'a\\b"c; d'
    assert opened(loaded(pki, LIGHT_4J, {"KAFKA_PRODUCER_PASSWORD": password})) == {
        "protocol": "sasl_ssl",
        "tls": {"ca": str(pki / "ca.pem"), "verify_host_name": False},
        "sasl": {"mechanism": "PLAIN", "username": "app", "password": password},
    }


@pytest.mark.parametrize(("properties", "sasl"), TABLE["sasl"].values(), ids=TABLE["sasl"])
def test_logins(pki: Path, properties: dict[str, Any], sasl: dict[str, Any]) -> None:
    """Without a protocol, a login has TLS: no property makes a connection weaker than the settings would."""
    security = loaded(pki, properties)
    assert opened(security) == {"sasl": sasl}
    assert security.effective_protocol == "sasl_ssl"


@pytest.mark.parametrize(("properties", "tls"), TABLE["tls"].values(), ids=TABLE["tls"])
def test_certificates_and_versions(pki: Path, properties: dict[str, Any], tls: dict[str, str]) -> None:
    """Stores by their type, versions as the oldest and the newest."""
    expected = {name: value.format(pki) if value.startswith("{}") else value for name, value in tls.items()}
    found = opened(loaded(pki, properties))["tls"]
    assert {name: str(value) for name, value in found.items()} == expected


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f'{PLAIN} username="a" password="${{file:secret}}";', "{}"),
        ("${file:secret}", f'{PLAIN} username="a" password="{{}}";'),
    ],
)
def test_a_secret_of_a_jaas_line_is_read_again(pki: Path, text: str, content: str) -> None:
    """The password, or the whole line, in a file that changes."""
    file = pki / "secret"
    file.write_text(content.format("first"))
    security = loaded(pki, {"sasl.mechanism": "PLAIN", "sasl.jaas.config": text})
    assert file in security.files
    file.write_text(content.format("second"))
    assert security.sasl
    assert security.sasl.password.get_secret_value() == "first"
    assert (current := security.current().sasl)
    assert (current.username, current.password.get_secret_value()) == ("a", "second")


@settings(max_examples=30)
@given(username=st.text(min_size=1), password=st.text(min_size=1))
def test_a_line_that_is_written_is_read_back(username: str, password: str) -> None:
    """What pipelines hand to Java's client; so quotes, backslashes and line breaks mean the same for both."""
    sasl = {"mechanism": "SCRAM-SHA-512", "username": username, "password": password}
    line = connector_options(KafkaSecurity.model_validate({"sasl": sasl})).secrets["sasl.jaas.config"]
    read = parse_jaas(line)
    assert (read["username"], read["password"]) == (username, password)
