from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from headrace.config.explain import json_schema, masked
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.load import load_config
from headrace.config.whole_file import WholeFile
from headrace.errors import ConfigError
from headrace.functions.triggers.kafka_trigger import KafkaTrigger
from headrace_devkit.devcluster.certificates import Authority
from yaml_table import table


def test_secrets_are_masked_by_type_and_by_name(tmp_path: Path) -> None:
    """No secret is shown; everything else is. Relative paths start at the folder of the file."""
    for name in ("ca.pem", "us.pem", "us.key"):
        (tmp_path / name).touch(0o600)
    path = tmp_path / "headrace.yaml"
    path.write_text(table(__file__, "text"))
    config: Any = load_config(path, {"PW": "hunter2", "HEADRACE__HTTP__PORT": "9000"})
    tls = config.reactive_consumers["a"].backend.tls
    assert (tls.ca, tls.key) == (tmp_path / "ca.pem", tmp_path / "us.key")
    shown = masked(config)
    assert "hunter2" not in str(shown)
    assert shown["kafka"]["properties"] == {"client.rack": "a"}
    login = {"mechanism": "PLAIN", "username": "bob", "password": "**********", "oauth": None}
    assert shown["kafka"]["security"] == {"protocol": None, "tls": None, "sasl": login}
    headers = shown["reactive_consumers"]["a"]["backend"]["headers"]
    assert headers == dict.fromkeys(("X-Api-Key", "Ocp-Apim-Subscription-Key", "X-Auth", "X-Team"), "*" * 10)
    assert shown["reactive_consumers"]["a"]["backend"]["url"] == "https://localhost/x?**********"
    assert shown["http"]["port"] == 9000


@pytest.mark.parametrize("model", [KafkaSecurity, WholeFile, KafkaTrigger])
def test_the_text_of_an_error_holds_no_value(model: type[BaseModel]) -> None:
    """A secret that was read again, and does not fit, stands in no log."""
    values = {name: {"password": "hunter2"} for name in ("sasl", "schema_registry", "kafka", "name")}
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)
    assert "hunter2" not in str(caught.value)


def test_schema_describes_every_setting() -> None:
    """The JSON Schema forbids unknown keys and carries a sentence for each setting."""
    schema = json_schema()
    assert (schema["title"], schema["description"]) == ("HeadraceConfig", "The whole file.")
    assert set(schema["properties"]) == set(WholeFile.model_fields) - WholeFile.internal
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        for name, setting in section["properties"].items():
            assert setting.get("description") or "$ref" in setting, name


@pytest.mark.parametrize("length", [20, 100, 300, 5000])
@pytest.mark.parametrize(("written", "section", "named"), table(__file__, "a_secret_in_the_setting_of_a_key"))
def test_a_secret_in_the_setting_of_a_key_is_not_shown(
    tmp_path: Path, length: int, written: str, section: str, named: str
) -> None:
    """Headrace reads it as the path of a file that does not exist, as of a key without its first line."""
    secret = "k" * length
    authority = Authority(tmp_path, "ca")
    tls = {"certificate": str(authority.issue("app").certificate), "key": written.format(key=secret)}
    settings = {"http": {"tls": tls}} if section == "http" else {"kafka": {"security": {"tls": tls}}}
    for name, text in (("headrace.yaml", json.dumps(settings)), ("key", secret)):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"tls\.key: ") as refused:
        load_config(tmp_path / "headrace.yaml", {"KEY": secret})
    assert str(refused.value).endswith(f"tls.key:{named} the path of a file: correct the path")
    assert secret not in str(refused.value)
