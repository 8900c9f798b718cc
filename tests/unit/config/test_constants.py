"""What left a file: each such key is refused with its line and with what holds now, and the code may still set it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml

from headrace.config.explain import known_keys, masked, moved
from headrace.config.load import load_config, read_config
from headrace.config.model import HeadraceConfig
from headrace.config.section import Section
from headrace.config.yaml_tree import KeyPath
from headrace.errors import ConfigError, PipelineInvalid
from headrace.pipelines.load import load_pipeline
from headrace.pipelines.spec import PipelineSpec

BACKEND = {"url": "http://localhost:1"}
CONSUMER = {"topics": ["t"], "group": "g", "backend": BACKEND}


def sections_of(kind: Any) -> Iterator[type[Section]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in get_args(kind):
        yield from sections_of(part)


def is_map(kind: Any) -> bool:
    return get_origin(kind) is dict or (get_origin(kind) is not list and any(map(is_map, get_args(kind))))


def constants(model: type[Section], at: KeyPath = ()) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        if name in model.internal:
            yield (*at, name)
            continue
        for section in sections_of(field.annotation):
            yield from constants(section, (*at, name, "one") if is_map(field.annotation) else (*at, name))


PATHS = [*dict.fromkeys([*constants(HeadraceConfig), *constants(PipelineSpec)])]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_each_constant_has_a_sentence(path: KeyPath) -> None:
    """And it is no key that hints propose."""
    assert moved(path)
    model = PipelineSpec if path[0] in PipelineSpec.model_fields and path[0] != "kafka" else HeadraceConfig
    if not any(part in ("sink", "sources") for part in path):
        assert path[-1] not in known_keys(path[:-1], model)


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"sql": {"max_rows": 5}}, "sql.max_rows"),
        ({"sql": {"max_rows": "many"}}, "sql.max_rows"),
        (
            {"reactive_consumers": {"a": {**CONSUMER, "retry": {"deadline_seconds": 5}}}},
            "reactive_consumers.a.retry.deadline_seconds",
        ),
        ({"tables": {"t": {"topic": "t", "max_rows": 5}}}, "tables.t.max_rows"),
        ({"kafka": {"security": {"tls": {"keystore": "a"}}}}, "kafka.security.tls.keystore"),
    ],
)
def test_a_file_of_before_is_refused_with_line_and_remedy(tmp_path: Path, settings: Any, path: str) -> None:
    """Once for each key, whatever its value is."""
    file = tmp_path / "headrace.yaml"
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError) as refused:
        load_config(file, {})
    (problem,) = refused.value.description.splitlines()
    assert problem.startswith(f"{file}:")
    assert f": {path}: {moved(tuple(path.split('.')))}" in problem


def test_a_variable_sets_no_constant() -> None:
    """Its name is the location."""
    with pytest.raises(
        ConfigError, match=r"^HEADRACE__SQL__MAX_ROWS: sql\.max_rows: removed: a response has 10000 rows"
    ):
        load_config(None, {"HEADRACE__SQL__MAX_ROWS": "5"})


def test_code_sets_constants_and_no_command_shows_them() -> None:
    """`config show` has what a file may have."""
    config = HeadraceConfig.model_validate({"sql": {"memory_bytes": 1 << 28}, "functions_reload": True})
    assert config.functions_reload
    shown = masked(config)
    assert "max_rows" not in shown["sql"]
    assert "request_timeout_seconds" not in shown["kafka"]


def test_properties_without_a_setting_may_be_written_with_a_section(tmp_path: Path) -> None:
    """What is read can be written again, as `config import` does."""
    (tmp_path / "ca.pem").touch()
    oauth = {"token_url": "https://localhost/t", "client_id": "a", "client_secret": "s"}
    security = {"tls": {"verify_host_name": False}, "sasl": {"mechanism": "OAUTHBEARER", "oauth": oauth}}
    properties = {
        "sasl.oauthbearer.extensions": "logicalCluster=lkc,pool=p",
        "ssl.enabled.protocols": "TLSv1.2,TLSv1.3",
    }
    file = tmp_path / "headrace.yaml"
    file.write_text(json.dumps({"kafka": {"security": security, "properties": properties}}))
    file.chmod(0o600)
    for _ in range(2):
        read = read_config(file, {})
        assert read.problems == []
        assert read.config
        sasl = read.config.kafka.security.sasl
        assert sasl
        assert sasl.oauth
        assert sasl.oauth.extensions == {"logicalCluster": "lkc", "pool": "p"}
        file.write_text(json.dumps(read.tree))
    file.write_text(json.dumps({"kafka": {"security": security, "properties": {"ssl.ca.location": "ca.pem"}}}))
    assert read_config(file, {}).problems == [
        f"{file}:1: kafka.properties.ssl.ca.location: has no effect with kafka.security: set tls.ca there instead"
    ]


PIPELINE = {
    "name": "p",
    "sources": {"s": {"topic": "t", "schema": "n INT"}},
    "flows": {"f": {"sql": "SELECT n FROM s", "sink": {"topic": "u"}}},
}


@pytest.mark.parametrize(
    ("sink", "path"),
    [
        ({"topic": "u", "backend": {**BACKEND, "health": {"path": "/"}}}, "backend.health"),
        ({"topic": "u", "backend": BACKEND, "push": {"retry": {"last_retry": True}}}, "push.retry.last_retry"),
        ({"topic": "u", "backend": BACKEND, "push": {"key_format": "json"}}, "push.key_format"),
        ({"console": True, "rows": 5}, "rows"),
    ],
)
def test_a_pipeline_file_of_before_is_refused(tmp_path: Path, sink: Any, path: str) -> None:
    """The kind of its sink decides which keys it may have."""
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump({**PIPELINE, "flows": {"f": {"sql": "SELECT n FROM s", "sink": sink}}}))
    with pytest.raises(PipelineInvalid) as refused:
        load_pipeline(file)
    assert f": flows.f.sink.{path}: removed: " in refused.value.description
