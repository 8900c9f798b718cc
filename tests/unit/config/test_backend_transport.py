"""How a backend is reached: what is refused at load, and that secrets are not shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.explain import masked
from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig

OAUTH = "oauth: {token_url: 'https://t/', client_id: me, client_secret: '${env:PW}'"


def load(folder: Path, backend: str) -> HeadraceConfig:
    path = folder / "headrace.yaml"
    path.write_text(f"reactive_consumers: {{a: {{topics: [t], group: g, backend: {{{backend}}}}}}}")
    path.chmod(0o600)
    return load_config(path, {"PW": "canary"})


def test_files_start_from_the_file_and_secrets_are_not_shown(tmp_path: Path) -> None:
    """Relative paths are anchored; token secret, key password and headers that hold secrets are masked."""
    for name in ("ca.pem", "us.pem", "us.key"):
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(0o600)
    headers = "{X-Api-Key: '${env:PW}', Ocp-Apim-Subscription-Key: '${env:PW}', X-Auth: '${env:PW}', X-Team: blue}"
    tls = "tls: {ca: ca.pem, certificate: us.pem, key: us.key, key_password: '${env:PW}'}"
    config = load(tmp_path, f"url: 'https://h', headers: {headers}, {tls}, {OAUTH}}}")
    backend = config.reactive_consumers["a"].backend  # type: ignore[attr-defined]
    assert (backend.tls.ca, backend.tls.key) == (tmp_path / "ca.pem", tmp_path / "us.key")
    shown = masked(config)  # type: ignore[arg-type]
    assert "canary" not in str(shown)
    assert shown["reactive_consumers"]["a"]["backend"]["headers"]["X-Team"] == "blue"


def test_a_key_that_others_may_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As that of the listener (decisions.md 16)."""
    for name in ("us.pem", "us.key"):
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(0o644)
    load(tmp_path, "url: 'https://h', tls: {certificate: us.pem, key: us.key}")
    assert "us.key holds a secret" in caplog.text
    assert "us.pem" not in caplog.text
