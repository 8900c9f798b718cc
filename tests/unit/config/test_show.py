from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config.explain import json_schema, masked
from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig

TEXT = """\
kafka:
  properties: {sasl.mechanism: PLAIN, sasl.password: "${env:PW}", sasl.username: bob, client.rack: a}
schema_registry: {username: a, password: "${env:PW}"}
reactive_consumers:
  a:
    topics: [t]
    group: g
    backend:
      url: "http://localhost/x?code=${env:PW}"
      headers: {Authorization: "${env:PW}", X-Team: blue}
      health: {path: "/up?key=${env:PW}"}
"""


def loaded(tmp_path: Path) -> Any:
    path = tmp_path / "headrace.yaml"
    path.write_text(TEXT)
    return load_config(path, {"PW": "hunter2", "HEADRACE__HTTP__PORT": "9000"})


def test_secrets_are_masked_by_type_and_by_name(tmp_path: Path) -> None:
    """No secret is shown, wherever it stands; everything else is."""
    shown = masked(loaded(tmp_path))
    assert "hunter2" not in str(shown)
    assert shown["kafka"]["properties"] == {"client.rack": "a"}
    login = {"mechanism": "PLAIN", "username": "bob", "password": "**********", "oauth": None}
    assert shown["kafka"]["security"] == {"protocol": None, "tls": None, "sasl": login}
    assert shown["reactive_consumers"]["a"]["backend"]["headers"] == {"Authorization": "**********", "X-Team": "blue"}
    assert shown["reactive_consumers"]["a"]["backend"]["url"] == "http://localhost/x?**********"
    assert shown["http"]["port"] == 9000


def test_schema_describes_every_setting() -> None:
    """The JSON Schema forbids unknown keys and carries a sentence for each setting."""
    schema = json_schema()
    assert set(schema["properties"]) == set(HeadraceConfig.model_fields)
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        for name, setting in section["properties"].items():
            assert setting.get("description") or "$ref" in setting, name
