"""Files that are refused: each with one sentence, the line and the fix, and without a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization

from headrace.cli.main import root
from headrace.config.load import load_config
from headrace.errors import ConfigError
from headrace_devkit.devcluster.certificates import Authority

CANARY = "c4nary"
"""Part of every secret here."""
WEAK: list[Any] = yaml.safe_load((Path(__file__).parent / "weak.yaml").read_text())
GROUPS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "bad.yaml").read_text())


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
    (folder / "encrypted.key").write_bytes(encrypted)
    (folder / "both.pem").write_bytes(app.key.read_bytes() + app.certificate.read_bytes())
    (folder / "garbage.pem").write_text(f"-----BEGIN {CANARY}")
    (folder / "open.key").write_bytes(app.key.read_bytes())
    (folder / "open.password").write_text(CANARY)
    (folder / "big").write_text("x" * 70_000)
    (folder / "bytes").write_bytes(b"\xff")
    for name in ("open.key", "open.password"):
        (folder / name).chmod(0o604)
    for name in ("encrypted.key", "both.pem", "garbage.pem"):
        (folder / name).chmod(0o600)
    (folder / "jks").write_bytes(b"\xfe\xed\xfe\xed\0\0\0\2" + CANARY.encode())
    return folder


@pytest.fixture
def refused(pki: Path) -> Callable[..., list[str]]:
    """Return a function that writes a file and returns what is said of it, a problem a line."""

    def refused(settings: Any, mode: int = 0o600, environ: bool = False) -> list[str]:
        file = pki / "headrace.yaml"
        file.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings, sort_keys=False))
        file.chmod(mode)
        with pytest.raises(ConfigError) as caught:
            load_config(None, settings) if environ else load_config(file, {"PW": CANARY})
        assert CANARY not in caught.value.description
        return caught.value.description.replace(f"{pki}/", "").splitlines()

    return refused


def merged(base: Any, change: Any) -> Any:
    """Return the tree `base` with what `change` sets."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {**base, **{key: merged(base.get(key), value) for key, value in change.items()}}


def cases() -> dict[str, tuple[Any, dict[str, Any], list[str]]]:
    """Return what a file has, how it is loaded, and patterns of what is said of it, by group and number."""
    found = {}
    for name, group in GROUPS.items():
        for number, case in enumerate(group["cases"], 1):
            given, says = (case, group["says"]) if "says" in group else case
            if at := group.get("at"):
                for part in reversed(at.split(".")):
                    given = {part: given}
                given, says = merged(group.get("with", {}), given), f"{at}...{says}"
            all_said = [
                ".*".join(map(re.escape, said.split("..."))) for said in ([says] if isinstance(says, str) else says)
            ]
            found[f"{name}-{number}"] = (
                given,
                {key: group[key] for key in ("mode", "environ") if key in group},
                all_said,
            )
    return found


@pytest.mark.parametrize(("settings", "how", "says"), cases().values(), ids=cases())
def test_what_a_file_may_not_say_is_refused(
    refused: Callable[..., list[str]], settings: Any, how: dict[str, Any], says: list[str]
) -> None:
    """Each problem with the line of the setting and what to write instead."""
    for problem, said in zip(refused(settings, **how), says, strict=True):
        assert re.search(said, problem), problem


@pytest.mark.parametrize("key", ["open.key", "${file:open.key}"])
def test_a_secret_file_that_others_can_read_is_refused(
    refused: Callable[..., list[str]], pki: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Unless it is a mount: of root, or of a group of this process."""
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        os.chown(pki / "open.key", 12345, 12345)
        os.chown(pki / "open.password", 12345, 12345)
    monkeypatch.setattr(os, "getegid", lambda: 54321)
    monkeypatch.setattr(os, "getgroups", list)
    login = {"mechanism": "PLAIN", "username": "a", "password": "${file:open.password}"}
    problems = refused({"kafka": {"security": {"tls": {"certificate": "app.pem", "key": key}, "sasl": login}}})
    for problem, name in zip(problems, ["open.key", "open.password"], strict=True):
        assert f"{name} holds a secret in plain text and its mode is 0604" in problem
        assert f"chmod 600 {name}" in problem


@pytest.mark.parametrize(("settings", "warnings"), WEAK)
def test_a_weak_setting_is_warned_of_once(
    pki: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], warnings: list[str]
) -> None:
    """What is given up, in words, and nothing of defaults; an expired certificate may yet be renewed."""
    monkeypatch.chdir(pki)
    Path("headrace.yaml").write_text(yaml.safe_dump(settings))
    Path("headrace.yaml").chmod(0o600)
    done = CliRunner().invoke(root, ["config", "check"], env={"PW": CANARY})
    assert done.exit_code == 0
    for said, warning in zip(done.stderr.splitlines(), warnings, strict=True):
        assert said.startswith(f"warning: {warning}")
