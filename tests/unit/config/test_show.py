from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from yaml_table import table

from headrace.config.explain import json_schema, masked
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig
from headrace.devcluster.certificates import Authority
from headrace.errors import ConfigError
from headrace.functions.triggers.kafka import KafkaTrigger

TEXT = table(__file__, "text")


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


@pytest.mark.parametrize("model", [KafkaSecurity, HeadraceConfig, KafkaTrigger])
def test_the_text_of_an_error_holds_no_value(model: type[BaseModel]) -> None:
    """A secret that was read again, and does not fit, stands in no log."""
    values = {name: {"password": "hunter2"} for name in ("sasl", "schema_registry", "kafka", "name")}
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)
    assert "hunter2" not in str(caught.value)


def test_schema_describes_every_setting() -> None:
    """The JSON Schema forbids unknown keys and carries a sentence for each setting."""
    schema = json_schema()
    assert set(schema["properties"]) == set(HeadraceConfig.model_fields)
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        for name, setting in section["properties"].items():
            assert setting.get("description") or "$ref" in setting, name


@pytest.mark.parametrize("section", ["sasl", "tls", "oauth"])
def test_a_text_where_a_section_belongs_is_not_shown(tmp_path: Path, section: str) -> None:
    """It may be the line of a login."""
    text = 'PlainLoginModule required password="hunter2";'
    security: dict[str, Any] = {"sasl": {"mechanism": "OAUTHBEARER", "oauth": text}} if section == "oauth" else {}
    (tmp_path / "headrace.yaml").write_text(json.dumps({"kafka": {"security": security or {section: text}}}))
    with pytest.raises(ConfigError, match="should be a valid dictionary") as refused:
        load_config(tmp_path / "headrace.yaml", {})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("length", [20, 100, 300, 5000])
@pytest.mark.parametrize(("written", "named"), table(__file__, "a_secret_that_stands_in_the_setting_of_a_key"))
def test_a_secret_that_stands_in_the_setting_of_a_key_is_not_shown(
    tmp_path: Path, length: int, written: str, named: str
) -> None:
    """It is taken for the path of a file, and there is none, as of a key without its first line."""
    secret = "k" * length
    authority = Authority(tmp_path, "ca")
    tls = {"certificate": str(authority.issue("app").certificate), "key": written.format(key=secret)}
    for name, text in (("headrace.yaml", json.dumps({"kafka": {"security": {"tls": tls}}})), ("key", secret)):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"tls\.key: ") as refused:
        load_config(tmp_path / "headrace.yaml", {"KEY": secret})
    assert str(refused.value).endswith(f"tls.key:{named} PEM text nor the path of a file: correct the path")
    assert secret not in str(refused.value)


@pytest.mark.parametrize("length", [20, 300])
def test_a_key_that_stands_in_the_settings_of_http_is_not_shown(tmp_path: Path, length: int) -> None:
    """Keys of servers and of clients of HTTP are always the paths of files."""
    certificate, secret = Authority(tmp_path, "ca").issue("app").certificate, "k" * length
    tls = {"certificate": str(certificate), "key": "${env:KEY}"}
    (tmp_path / "headrace.yaml").write_text(json.dumps({"http": {"tls": tls}}))
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "headrace.yaml", {"KEY": secret})
    assert str(refused.value).endswith("http.tls.key: ${env:KEY} is not the path of a file: correct the path")
