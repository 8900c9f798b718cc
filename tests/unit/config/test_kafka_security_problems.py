"""Wrong settings of `kafka.security`: `run` and `config check` end with 78, the line and the fix, and no secret."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from headrace.cli.main import main
from headrace.devcluster.certificates import STORE_PASSWORD, Authority

CANARY = "c4nary"
"""Part of every secret here."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, keys and stores that fit, and some that do not."""
    folder = tmp_path_factory.mktemp("pki")
    authority = Authority(folder, "ca")
    app = authority.issue("app")
    authority.issue("other")
    authority.issue("old", days=-1)
    key = serialization.load_pem_private_key(app.key.read_bytes(), None)
    protection = serialization.BestAvailableEncryption(f"{CANARY}-key".encode())
    encrypted = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
    certificate = x509.load_pem_x509_certificate(app.certificate.read_bytes())
    (folder / "encrypted.key").write_bytes(encrypted)
    (folder / "app.der").write_bytes(certificate.public_bytes(serialization.Encoding.DER))
    (folder / "both.pem").write_bytes(app.key.read_bytes() + app.certificate.read_bytes())
    (folder / "garbage.pem").write_text(f"-----BEGIN {CANARY}")
    (folder / "open.key").write_bytes(app.key.read_bytes())
    (folder / "open.password").write_text(CANARY)
    for name in ("open.key", "open.password"):
        (folder / name).chmod(0o604)
    for name in ("encrypted.key", "both.pem", "garbage.pem"):
        (folder / name).chmod(0o600)
    (folder / "jks").write_bytes(b"\xfe\xed\xfe\xed\0\0\0\2" + CANARY.encode())
    (folder / "folder.pem").mkdir()
    return folder


def write(folder: Path, text: str, mode: int = 0o600) -> None:
    file = folder / "headrace.yaml"
    file.write_text(text)
    file.chmod(mode)


def headrace(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture
def refused(pki: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that writes a file and returns the one problem that both commands report."""
    monkeypatch.chdir(pki)

    def refused(text: str, mode: int = 0o600) -> str:
        write(pki, text, mode)
        found = []
        for command in (("config", "check"), ("run",)):
            assert headrace(*command) == 78, f"{command}: {capsys.readouterr()}"
            found.append(capsys.readouterr().err)
        assert found[0] == found[1]
        assert CANARY not in found[0]
        return found[0].replace(f"{pki}/", "")

    return refused


def section(**settings: Any) -> str:
    """Return a file with `kafka.security`, a setting per line."""
    return yaml.safe_dump({"kafka": {"security": settings}}, sort_keys=False)


def tls(**settings: Any) -> str:
    return section(tls=settings)


def sasl(**settings: Any) -> str:
    return section(sasl=settings)


def oauth(**settings: Any) -> str:
    given = {"token_url": "https://localhost/t", "client_id": "a", "client_secret": CANARY, **settings}
    return sasl(mechanism="OAUTHBEARER", oauth={name: value for name, value in given.items() if value is not None})


def properties(**settings: Any) -> str:
    """Return a file with `kafka.properties`; two underscores stand for a dot."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return yaml.safe_dump({"kafka": {"properties": named}}, sort_keys=False)


def jaas(line: str, mechanism: str = "PLAIN") -> str:
    return properties(security__protocol="SASL_SSL", sasl__mechanism=mechanism, sasl__jaas__config=line)


PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
PAIR = {"certificate": "app.pem", "key": "app.key"}
LOGIN = {"username": "a", "password": CANARY}
PROBLEMS: dict[str, tuple[str, str]] = {
    # The login
    "no password": (sasl(mechanism="PLAIN", username="a"), "3: kafka.security.sasl: mechanism PLAIN needs password"),
    "no user": (sasl(mechanism="SCRAM-SHA-256", password=CANARY), "3: kafka.security.sasl: .* needs username, .*: set"),
    "empty reference": (
        sasl(mechanism="PLAIN", username="a", password="${EMPTY:}"),
        "3: kafka.security.sasl: .* needs password, which is missing or empty: set it",
    ),
    "no mechanism": (sasl(**LOGIN), "3: kafka.security.sasl.mechanism: is missing .*: add it"),
    "unknown mechanism": (
        sasl(mechanism="SCRAM-SHA-1", **LOGIN),
        "4: kafka.security.sasl.mechanism: should be .*SCRAM-SHA-512.*: correct",
    ),
    "kerberos": (sasl(mechanism="GSSAPI"), "4: kafka.security.sasl.mechanism: is GSSAPI, which needs Kerberos .*: "),
    "token and user": (
        sasl(mechanism="OAUTHBEARER", username="a", oauth={"token_url": "https://localhost", "client_id": "b"}),
        "6: kafka.security.sasl.oauth.client_secret: is missing .*: add it",
    ),
    "token with a user": (
        oauth().replace("      oauth:", "      username: a\n      oauth:"),
        "3: kafka.security.sasl: has username or password, .*: remove them",
    ),
    "no token server": (
        sasl(mechanism="OAUTHBEARER"),
        "3: kafka.security.sasl: OAUTHBEARER needs oauth: set oauth.tok",
    ),
    "token server with a password": (
        oauth().replace("OAUTHBEARER", "PLAIN"),
        "3: kafka.security.sasl: has oauth, which PLAIN does not use: remove it",
    ),
    "token over plain HTTP": (
        oauth(token_url="http://idp.example.com/t"),
        "6: kafka.security.sasl.oauth.token_url: .*https",
    ),
    "empty client secret": (
        oauth(client_secret=""),
        "3: kafka.security.sasl: OAUTHBEARER needs .* a client_secret with text",
    ),
    "name of an extension": (
        oauth(extensions={"logical-cluster": "lkc"}),
        "9: kafka.security.sasl.oauth.extensions: .* ASCII letters only",
    ),
    "reserved extension": (
        oauth(extensions={"auth": "x"}),
        "9: .*extensions: has an extension whose name is auth.*KIP-342",
    ),
    "value of an extension": (oauth(extensions={"a": f"{CANARY},b=c"}), "9: .*extensions: .* without commas"),
    "authorities of the token server": (
        oauth(ca="garbage.pem"),
        "9: kafka.security.sasl.oauth.ca: holds no certificates in PEM: correct it.*keytool",
    ),
    # The protocol
    "unknown protocol": (section(protocol="tls"), "3: kafka.security.protocol: should be .*sasl_ssl"),
    "login without a protocol for it": (
        section(protocol="ssl", sasl={"mechanism": "PLAIN", **LOGIN}),
        "2: kafka.security: has sasl, .*: set protocol: sasl_ssl",
    ),
    "protocol without a login": (section(protocol="SASL_SSL"), "2: kafka.security: protocol sasl_ssl needs a login: "),
    "certificates without TLS": (
        section(protocol="plaintext", tls={"ca": "ca.pem"}),
        "2: kafka.security: has tls, and protocol plaintext has no TLS: set",
    ),
    # Versions
    "versions": (tls(min_version=1.3, max_version=1.2), "3: kafka.security.tls: min_version 1.3 is newer .*: swap"),
    "old version": (tls(min_version=1.1), "4: kafka.security.tls.min_version: should be '1.2' or '1.3'"),
    "unknown version": (tls(max_version="newest"), "4: kafka.security.tls.max_version: should be '1.2' or '1.3'"),
    # Certificates
    "key without certificate": (tls(key="app.key"), "3: kafka.security.tls: needs certificate and key together: set"),
    "certificate without key": (tls(certificate="app.pem"), "3: kafka.security.tls: needs certificate and key"),
    "password without key": (tls(key_password=CANARY), "3: kafka.security.tls: key_password is set without key: set"),
    "two identities": (
        tls(keystore="app.p12", keystore_password=STORE_PASSWORD, **PAIR),
        "3: kafka.security.tls: has both keystore and certificate: keep one",
    ),
    "store without password": (tls(keystore="app.p12"), "3: kafka.security.tls: needs keystore and keystore_password"),
    "no such file": (
        tls(ca="none.pem"),
        "4: kafka.security.tls.ca: is neither PEM text nor the path of a file: correct the path",
    ),
    "folder": (tls(ca="folder.pem"), "4: kafka.security.tls.ca: is neither PEM text nor the path of a file"),
    "store and password in each other's place": (
        tls(keystore=CANARY, keystore_password="app.p12"),
        "4: kafka.security.tls.keystore: is neither PEM text nor the path of a file: correct the path",
    ),
    "a password in place of a certificate": (
        tls(ca="${file:open.password}"),
        "4: kafka.security.tls.ca: .{file:open.password} is neither PEM text nor the path of a file: correct the path",
    ),
    "a password in place of another file": (
        yaml.safe_dump({"schema_registry": {"url": "https://localhost", "tls": {"ca": "${file:open.password}"}}}),
        "3: schema_registry.tls.ca: .{file:open.password} is not the path of a file: correct the path",
    ),
    "unreadable": (tls(ca="/proc/self/mem"), "4: kafka.security.tls.ca: names /proc/self/mem, which cannot be read: "),
    "authorities are no PEM": (tls(ca="garbage.pem"), "4: .*tls.ca: holds no certificates in PEM: "),
    "authorities are DER": (tls(ca="app.der"), "4: .*tls.ca: holds no certificates in PEM: correct"),
    "text is no PEM": (tls(ca=f"-----BEGIN {CANARY}"), "4: .*tls.ca: holds no certificates in PEM: correct"),
    "certificate is no PEM": (
        tls(certificate="jks", key="app.key"),
        "4: .*tls.certificate: holds no certificate in PEM: correct it, or set keystore",
    ),
    "key is no PEM": (tls(certificate="app.pem", key="garbage.pem"), "5: .*tls.key: holds no priv"),
    "another key": (
        tls(certificate="app.pem", key="other.key"),
        "5: .*tls.key: does not belong to the first certificate of certificate: set both",
    ),
    "key without its password": (
        tls(certificate="app.pem", key="encrypted.key"),
        "5: .*tls.key: is encrypted: set key_password",
    ),
    "wrong password of the key": (
        tls(certificate="app.pem", key="encrypted.key", key_password=CANARY),
        "5: .*tls.key: cannot be opened with key_password: correct it",
    ),
    "password of a plain key": (
        tls(**PAIR, key_password=CANARY),
        "5: .*tls.key: is not encrypted: remove key_password",
    ),
    "wrong password of the store": (
        tls(keystore="app.p12", keystore_password=CANARY),
        "4: .*tls.keystore: names app.p12, which is no PKCS#12 file that keystore_password opens: correct",
    ),
    "store is PEM": (
        tls(keystore="both.pem", keystore_password=CANARY),
        "4: .*tls.keystore: names both.pem, which is PEM: set certificate and key to it instead",
    ),
    "JKS key store": (
        tls(keystore="jks", keystore_password=CANARY),
        r"4: .*keystore: names jks, a JKS store. .*keytool -importkeystore -deststoretype PKCS12 -srckeystore jks ",
    ),
    "JKS trust store": (tls(ca="jks"), "4: .*tls.ca: .*keytool -list -rfc -keystore jks > jks.pem"),
    # Files that others can read
    "reference that vanished": (
        sasl(mechanism="PLAIN", username="a", password="${file:gone}"),
        "6: kafka.security.sasl.password: file not found, or not a plain file: gone",
    ),
    # Properties of Java's clients and of librdkafka
    "both ways": (
        section(tls={"ca": "ca.pem"}) + "  properties:\n    sasl.password: c4nary",
        "6: kafka.properties.sasl.password: has no effect with kafka.security: set sasl.password there, remove",
    ),
    "the producer alone": (
        f"producer:\n  properties:\n    sasl.password: {CANARY}",
        "3: producer.properties.sasl.password: is not taken here: set kafka.security.sasl.password, which all",
    ),
    "no JAAS line": (jaas(f'{PLAIN} username="a" password="{CANARY};'), "5: .*jaas.config: is no JAAS line: write"),
    "JAAS line cut off": (jaas(f'{PLAIN} username="a" password="{CANARY}"'), "5: .*jaas.config: is no JAAS line"),
    "JAAS line without a password": (jaas(f'{PLAIN} username="a";'), "4: kafka.security.sasl: .* needs password"),
    "unknown option": (jaas(f'{PLAIN} usrname="a" password="{CANARY}";'), "5: .*has the option usrname, .*: remove it"),
    "another module": (
        jaas(f'{PLAIN} username="a" password="{CANARY}";', "SCRAM-SHA-256"),
        "4: kafka.security.sasl: has a login module of PLAIN and the mechanism SCRAM-SHA-256: change",
    ),
    "module of Kerberos": (
        jaas('com.sun.security.auth.module.Krb5LoginModule required useKeyTab="true";', "GSSAPI"),
        "5: .*jaas.config: names the login module Krb5LoginModule, which is not supported: use Plain",
    ),
    "a password in place of a module": (
        properties(**{"sasl.jaas.config.module": "${file:open.password}"}),
        "3: kafka.security.sasl: names the login module, which is not supported: use PlainLoginModule",
    ),
    "a password in place of an algorithm": (
        properties(**{"ssl.endpoint.identification.algorithm": "${file:open.password}"}),
        "3: .*identification.algorithm: has a value that is not supported: set https, or an empty text",
    ),
    "a password in place of an extension": (
        oauth(extensions={CANARY: "b"}),
        "9: kafka.security.sasl.oauth.extensions: has an extension whose name is auth, or not of ASCII letters",
    ),
    "one setting, two properties": (
        properties(sasl__mechanism="PLAIN", sasl__username="a", **{"sasl.jaas.config.username": "b"}),
        "5: .*jaas.config.username: sets kafka.security.sasl.username, as sasl.username does: remove one",
    ),
    "host name algorithm": (
        properties(security__protocol="SSL", **{"ssl.endpoint.identification.algorithm": "algo-name"}),
        "4: .*algorithm: has a value that is not supported: set https, or an empty text",
    ),
    "old versions of Java": (
        properties(security__protocol="SSL", **{"ssl.enabled.protocols": "TLSv1.1,TLSv1.2"}),
        "4: .*enabled.protocols: .* is not supported: set TLSv1.2, TLSv1.3 or both",
    ),
    "JKS trust store of Java": (
        properties(security__protocol="SSL", **{"ssl.truststore.location": "jks", "ssl.truststore.password": CANARY}),
        "4: kafka.security.tls.ca: .*keytool -list -rfc -keystore jks > jks.pem",
    ),
    "TLS without a protocol for it": (
        properties(security__protocol="PLAINTEXT", **{"ssl.truststore.location": "ca.pem"}),
        "3: kafka.security: has tls, and protocol plaintext has no TLS: set",
    ),
    "suites of TLS 1.2": (
        tls(min_version=1.3) + "  properties:\n    ssl.cipher.suites: ECDHE-RSA-AES128-SHA",
        "1: kafka: has properties.ssl.cipher.suites, .*: remove one",
    ),
}


@pytest.mark.parametrize(("text", "problem"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_wrong_combination_is_refused_with_line_and_fix(refused: Callable[..., str], text: str, problem: str) -> None:
    """One problem, with the line of the setting."""
    found = refused(text)
    assert re.match(f"headrace.yaml:{problem}", found), found
    assert found.count("\n") == 1, found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (sasl(mechanism="PLAIN", **LOGIN), "6: kafka.security.sasl.password: "),
        (jaas(f'{PLAIN} username="${{U:a}}" password="{CANARY}";'), "5: kafka.properties.sasl.jaas.config.password: "),
    ],
)
def test_a_secret_in_a_file_of_others_is_refused(refused: Callable[..., str], text: str, problem: str) -> None:
    """Whatever form it has."""
    found = refused(text, 0o644)
    assert found.startswith(f"headrace.yaml:{problem}headrace.yaml holds a secret in plain text and its mode is 0644")
    assert "chmod 600 headrace.yaml" in found


def test_the_text_of_a_key_is_a_secret(refused: Callable[..., str], pki: Path) -> None:
    """In the file itself."""
    text = tls(certificate="app.pem", key=(pki / "app.key").read_text())
    assert re.match("headrace.yaml:5: kafka.security.tls.key: headrace.yaml holds a secret", refused(text, 0o644))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_the_right_to_read_is_named(refused: Callable[..., str], pki: Path) -> None:
    """With the reason of the operating system."""
    (pki / "closed.pem").touch(0o000)
    assert "names closed.pem, which cannot be read: Permission denied" in refused(tls(ca="closed.pem"))


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        (tls(certificate="app.pem", key="open.key"), "open.key", "5: kafka.security.tls.key: "),
        (tls(certificate="app.pem", key="${file:open.key}"), "open.key", "5: kafka.security.tls.key: "),
        (
            sasl(mechanism="PLAIN", username="a", password="${file:open.password}"),
            "open.password",
            "6: kafka.security.sasl.password: ",
        ),
    ],
)
def test_a_secret_file_that_others_can_read_is_refused(
    refused: Callable[..., str], pki: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, line: str
) -> None:
    """Unless it is a mount: of root, or of a group of this process."""
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        os.chown(pki / name, 12345, 12345)
    monkeypatch.setattr(os, "getegid", lambda: 54321)
    monkeypatch.setattr(os, "getgroups", list)
    found = refused(text.replace(CANARY, "${env:PATH}"))
    assert found.startswith(f"headrace.yaml:{line}{name} holds a secret in plain text and its mode is 0604")
    assert f"chmod 600 {name}" in found


WARNINGS = {
    "tls.verify_host_name": tls(verify_host_name=False),
    "tls.verify_certificate": tls(verify_certificate=False, verify_host_name=False),
    "protocol is sasl_plaintext, so the network can read the records and the password": section(
        protocol="sasl_plaintext", sasl={"mechanism": "PLAIN", "username": "a", "password": "${env:PW}"}
    ),
    "protocol is sasl_plaintext, so the network can read the records: use": section(
        protocol="sasl_plaintext", sasl={"mechanism": "SCRAM-SHA-256", "username": "a", "password": "${env:PW}"}
    ),
    "tls.certificate is valid from": tls(certificate="old.pem", key="old.key"),
    "tls.keystore is valid from": tls(keystore="old.p12", keystore_password=STORE_PASSWORD),
}


@pytest.mark.parametrize(("warning", "text"), WARNINGS.items())
def test_a_weak_setting_is_warned_of_once(
    pki: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], warning: str, text: str
) -> None:
    """What is given up, in words; an expired certificate may be renewed while Headrace runs."""
    monkeypatch.chdir(pki)
    monkeypatch.setenv("PW", CANARY)
    write(pki, text)
    assert headrace("config", "check") == 0
    found = capsys.readouterr().err
    assert found.startswith(f"warning: kafka.security.{warning}")
    assert found.count("\n") == 1, found
    assert headrace("config", "show") == 0
    assert CANARY not in capsys.readouterr().out


def test_the_commands_for_stores_make_usable_files(
    refused: Callable[..., str], pki: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Java's tool follows the words of the errors."""
    make = ["keytool", "-genkeypair", "-alias", "a", "-keyalg", "RSA", "-dname", "CN=app", "-storetype", "JKS"]
    subprocess.run(
        [*make, "-keystore", "client jks", "-storepass", "changeit", "-keypass", "changeit"], cwd=pki, check=True
    )
    for text, new in (
        (tls(ca="client jks"), {"ca": "client jks.pem"}),
        (
            tls(keystore="client jks", keystore_password="changeit"),
            {"keystore": "client jks.p12", "keystore_password": "changeit"},
        ),
    ):
        command = re.search("run: (keytool .*)", refused(text))
        assert command
        answers = "changeit\n" * 3
        subprocess.run(command[1], shell=True, cwd=pki, input=answers.encode(), check=True)
        write(pki, tls(**new))
        assert headrace("config", "check") == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("url", "username", "warned"),
    [("http://far:1", "a", True), ("http://far:1", "", False), ("http://localhost:1", "a", False)],
)
def test_a_password_on_an_open_way_to_the_registry_is_warned_of(
    pki: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    url: str,
    username: str,
    warned: bool,
) -> None:
    """On this machine the network does not see it."""
    monkeypatch.chdir(pki)
    login = {"username": username, "password": CANARY} if username else {}
    write(pki, yaml.safe_dump({"schema_registry": {"url": url, **login}}))
    assert headrace("config", "check") == 0
    warning = "warning: schema_registry.url is not https, so the network can read the password: use https\n"
    assert capsys.readouterr().err == (warning if warned else "")
