"""The connector's options of TLS and login, read as Java reads them."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from cryptography.hazmat.primitives.serialization import load_pem_private_key as load_key
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace_devkit.devcluster.certificates import STORE_PASSWORD, Authority, KeyFiles
from headrace_pipelines.connector import connector_options, refusal, write_secrets
from headrace_pipelines.spec import PipelineSpec
from tests.pipeline_harness import document
from yaml_table import table


def security(**values: Any) -> KafkaSecurity:
    return KafkaSecurity.model_validate(values)


def scram(username: str, password: str) -> dict[str, Any]:
    return {"mechanism": "SCRAM-SHA-256", "username": username, "password": password}


def as_properties(text: str) -> dict[str, str]:
    """Read a file as `java.util.Properties` does, as far as escapes of four digits go."""
    pairs = (line.split("=", 1) for line in text.splitlines())
    units = {name: re.sub(r"\\u(....)", lambda found: chr(int(found[1], 16)), value) for name, value in pairs}
    return {name: value.encode("utf-16", "surrogatepass").decode("utf-16") for name, value in units.items()}


def jaas_options(line: str) -> dict[str, str]:
    """Read the options of a JAAS line as Java's StreamTokenizer reads quoted texts."""
    options: dict[str, str] = {}
    for name, text in re.findall(r'(\w[\w.]*)="((?:[^"\\\n]|\\.)*)"', line):
        options[name] = re.sub(r"\\(.)", lambda found: {"n": "\n", "r": "\r"}.get(found[1], found[1]), text)
    return options


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(username=_TEXTS, password=_TEXTS)
def test_every_user_and_password_arrives_at_the_client(
    tmp_path_factory: pytest.TempPathFactory, username: str, password: str
) -> None:
    """Quotes, backslashes, line ends and any other character survive the file and the JAAS line."""
    folder = tmp_path_factory.mktemp("run")
    found = connector_options(security(protocol="sasl_plaintext", sasl=scram(username, password)))
    write_secrets(folder, found.secrets)
    line = as_properties((folder / "secrets.properties").read_text("ascii"))["sasl.jaas.config"]
    assert line.startswith("org.apache.kafka.common.security.scram.ScramLoginModule required username=")
    assert jaas_options(line) == {"username": username, "password": password}


def test_options_hold_references_only(tmp_path: Path) -> None:
    """Neither secrets nor certificates are in the options; the file is for its owner, and goes when none is left."""
    password = "c4nary"
    found = connector_options(security(sasl=scram("app", password)))
    assert password not in str(found.options)
    assert found.options["kafka.sasl.jaas.config"] == "${file:secrets.properties:sasl.jaas.config}"
    assert found.options["kafka.security.protocol"] == "SASL_SSL"
    assert found.values == {password}
    write_secrets(tmp_path, found.secrets)
    assert stat.S_IMODE((tmp_path / "secrets.properties").stat().st_mode) == 0o600
    write_secrets(tmp_path, {})
    assert list(tmp_path.iterdir()) == []
    write_secrets(tmp_path, {"name": password}, shared=True)  # other nodes of a cluster cannot read memory of this one
    assert not (tmp_path / "secrets.properties").is_symlink()
    assert stat.S_IMODE((tmp_path / "secrets.properties").stat().st_mode) == 0o600


def test_tokens_come_from_a_server_over_its_own_authority(tmp_path: Path) -> None:
    """Client, scopes and extensions are in the JAAS line; the URL is an option, which the JVM compares."""
    authority = Authority(tmp_path, "ca").certificate
    oauth, expected = table(__file__, "oauth"), table(__file__, "jaas_of_oauth")
    found = connector_options(security(sasl={"mechanism": "OAUTHBEARER", "oauth": {**oauth, "ca": str(authority)}}))
    options = jaas_options(found.secrets["sasl.jaas.config"])
    assert options == {**expected, "ssl.truststore.certificates": authority.read_text().strip()}
    assert found.options["kafka.sasl.oauthbearer.token.endpoint.url"] == "https://localhost:1/token"


def encrypted(files: KeyFiles) -> dict[str, Any]:
    """Return a certificate whose key has a password, in the encryption that Java 17 cannot read."""
    key = load_key(files.key.read_bytes(), None)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"pw"))
    return {"certificate": files.certificate.read_text(), "key": text.decode(), "key_password": "pw"}


@pytest.mark.parametrize("kind", ["files", "text", "store"])
def test_every_form_of_a_certificate_becomes_the_one_that_java_reads(tmp_path: Path, kind: str) -> None:
    """Files, text with a password and PKCS#12 give the chain and an open PKCS#8 key."""
    files = Authority(tmp_path, "ca").issue("app")
    forms: dict[str, dict[str, Any]] = {
        "files": {"certificate": str(files.certificate), "key": str(files.key)},
        "text": encrypted(files),
        "store": {"keystore": str(files.store), "keystore_password": STORE_PASSWORD},
    }
    found = connector_options(security(tls={"ca": str(tmp_path / "ca.pem"), **forms[kind]}))
    assert found.secrets["ssl.keystore.key"] == files.key.read_text()
    assert found.secrets["ssl.keystore.certificate.chain"].startswith(files.certificate.read_text().strip())
    assert found.secrets["ssl.truststore.certificates"] == (tmp_path / "ca.pem").read_text().strip()
    assert found.options["kafka.ssl.keystore.type"] == "PEM"


def test_versions_and_the_host_name_are_what_the_settings_say() -> None:
    """Versions become a list and the newest of it; only a written setting ends the check of the host."""
    loose = connector_options(security(tls={"min_version": "1.3", "verify_host_name": False})).options
    assert (loose["kafka.ssl.enabled.protocols"], loose["kafka.ssl.protocol"]) == ("TLSv1.3", "TLSv1.3")
    assert loose["kafka.ssl.endpoint.identification.algorithm"] == ""
    usual = connector_options(security(protocol="ssl")).options
    assert (usual["kafka.ssl.enabled.protocols"], usual["kafka.ssl.protocol"]) == ("TLSv1.2,TLSv1.3", "TLSv1.3")
    assert usual["kafka.ssl.endpoint.identification.algorithm"] == "https"
    assert connector_options(security()) == ({}, {}, frozenset())


@pytest.mark.parametrize(("reported", "expected"), table(__file__, "reports_of_java"))
def test_a_report_of_java_becomes_the_sentence_of_the_other_clients(reported: str, expected: str) -> None:
    """Cause and fix, in the words of readiness and `doctor`."""
    kafka = KafkaConfig(bootstrap_servers="b:1", security=security(sasl=scram("app", "c4nary")))
    spec = PipelineSpec.model_validate(document(sources={"a": {"topic": "in", "schema": "x INT"}}))
    assert expected in refusal(reported, kafka, spec)


def test_a_process_that_is_killed_leaves_no_secret(tmp_path: Path) -> None:
    """Other processes read the file while it lives; a process that waits for its end does not replace it."""
    code = (
        "import sys, time; from pathlib import Path; from headrace_pipelines.connector import write_secrets\n"
        "write_secrets(Path(sys.argv[1]), {'name': 'c4nary'}); print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        assert as_properties((tmp_path / "secrets.properties").read_text("ascii")) == {"name": "c4nary"}
        write_secrets(tmp_path, {"name": "other"}, keeps_others=True)
        assert as_properties((tmp_path / "secrets.properties").read_text("ascii")) == {"name": "c4nary"}
        process.kill()
    assert not (tmp_path / "secrets.properties").exists()
    write_secrets(tmp_path, {"name": "other"}, keeps_others=True)
    assert as_properties((tmp_path / "secrets.properties").read_text("ascii")) == {"name": "other"}
    write_secrets(tmp_path, {})
    assert not [*tmp_path.iterdir()]
