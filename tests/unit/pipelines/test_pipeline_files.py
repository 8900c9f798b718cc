"""Pipeline files: what they may say, and how their mistakes are reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import PipelineInvalid
from headrace_devkit.devcluster.certificates import Authority
from headrace_pipelines.driver_tasks import TaskDriver
from headrace_pipelines.load import load_pipeline
from headrace_pipelines.spec import PipelineSpec
from yaml_table import table

GOOD = table(__file__, "good")


def write(folder: Path, text: str) -> Path:
    path = folder / "delays.yaml"
    path.write_text(text)
    return path


def with_sql(folder: Path, sql: str) -> Path:
    """Write a file whose flow has this `sql` or `sql_file`."""
    return write(folder, GOOD.replace("sql: SELECT carrier, count(*) AS n FROM late GROUP BY carrier", sql))


def load(folder: Path, text: str) -> PipelineSpec:
    return load_pipeline(write(folder, text))


@pytest.mark.parametrize(("sql", "warning"), table(__file__, "a_check_warns_of_sql_that_its_parser_cannot_read"))
def test_a_check_warns_of_sql_that_its_parser_cannot_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sql: str, warning: str
) -> None:
    """Spark knows more SQL than the parser, so Spark decides."""
    pytest.importorskip("sqlglot")
    deep = sql.format(left="(" * 500, right=")" * 500)
    load_pipeline(with_sql(tmp_path, f"sql: {deep} -- late"), check=True)
    assert warning in caplog.text
    assert bool(caplog.records) == bool(warning)


@pytest.mark.parametrize(("query", "place"), table(__file__, "a_mistake_in_sql_has_the_line_of_the_sql"))
def test_a_mistake_in_sql_has_the_line_of_the_sql(tmp_path: Path, query: str, place: str) -> None:
    """In its own file with the column; a comment or text with the same word is not the place."""
    pytest.importorskip("sqlglot")
    lines = [
        "-- by carier" if "file" in query else "SELECT 1 AS n,",
        "SELECT 'carier' AS c," if "file" in query else "  2 AS m,",
        "       carier, count(*) AS n FROM late GROUP BY carrier",
    ]
    (tmp_path / "q.sql").write_text("\n".join(lines))
    with pytest.raises(PipelineInvalid) as caught:
        load_pipeline(with_sql(tmp_path, query.format("\n      ".join(lines))), check=True)
    assert f"{tmp_path}/{place}" in caught.value.description


def test_a_mistake_that_spark_finds_has_its_line_and_column(tmp_path: Path) -> None:
    """Spark counts columns from 0. The position in another text, such as that of a key, is left out."""
    path = with_sql(tmp_path, "sql_file: q.sql")
    (tmp_path / "q.sql").write_text("SELECT carrier,\n tax(n) AS n FROM late GROUP BY carrier")
    driver = TaskDriver(tmp_path, debug=False)
    text = "[UNRESOLVED_ROUTINE] Cannot resolve routine `{}` on search path. SQLSTATE: 42883; line 2 pos 1;"
    for name, place in (("tax", "q.sql:2:2: flows.late_by_carrier: calls tax"), ("key", "delays.yaml:7: flows.late")):
        problem = {"part": "flows.late_by_carrier", "text": text.format(name), "stack": ""}
        found = driver.sentence(path, problem)
        assert found.startswith(f"{tmp_path}/{place}")
        assert "line 2" not in found


def test_without_the_parser_a_check_says_that_sql_is_unchecked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that looks at less says so."""
    monkeypatch.setitem(sys.modules, "sqlglot", None)
    path = write(tmp_path, GOOD)
    load_pipeline(path, check=True)
    assert caplog.messages == [f"{path}:1: the SQL of pipeline delays is not checked: install headrace[pipelines]"]


def secured(folder: Path, security: str, servers: str = "other:1") -> str:
    """Return a file with brokers and a login of its own; `security` is in YAML's flow style."""
    (folder / "password").write_text("s3cret")
    (folder / "password").chmod(0o600)
    return f"{GOOD}kafka:\n  bootstrap_servers: {servers}\n  security: {security}\n"


def test_a_pipeline_may_have_a_cluster_and_a_login_of_its_own(tmp_path: Path) -> None:
    """References and paths work as in headrace.yaml, and the login is not for the brokers of others."""
    Authority(tmp_path, "ca")
    login = {"mechanism": "PLAIN", "username": "a", "password": "b"}
    shared = KafkaConfig.model_validate({"bootstrap_servers": "shared:1", "security": {"sasl": login}})
    sasl = "{mechanism: PLAIN, username: app, password: '${file:password}'}"
    own = load(tmp_path, secured(tmp_path, f"{{tls: {{ca: ca.pem}}, sasl: {sasl}}}")).cluster(shared)
    assert own.bootstrap_servers == "other:1"
    assert own.security.tls
    assert own.security.tls.ca == str(tmp_path / "ca.pem")
    for password in ("s3cret", "new"):
        (tmp_path / "password").write_text(password)
        found = own.security.current().sasl
        assert found
        assert found.password.get_secret_value() == password

    def cluster(kafka: str, inherited: KafkaConfig = shared) -> KafkaConfig:
        return load(tmp_path, f"{GOOD}kafka: {kafka}\n").cluster(inherited)

    plain = cluster("{bootstrap_servers: 'other:1', security: {protocol: plaintext}}")
    assert (plain.bootstrap_servers, plain.security.sasl) == ("other:1", None)
    for kafka in ("{bootstrap_servers: 'other:1'}", "{security: {}}"):
        with pytest.raises(PipelineInvalid, match="reaches its brokers by sasl_ssl, which is not inherited: write"):
            cluster(kafka)
    assert cluster("{bootstrap_servers: 'other:1'}", KafkaConfig()).bootstrap_servers == "other:1"
    assert load(tmp_path, GOOD).cluster(shared) is shared
    assert cluster("{bootstrap_servers: 'shared:1'}") is shared
