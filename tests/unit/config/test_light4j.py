"""Folders of light-4j: the sample sets, placeholders, every key of the table, and configurations that are refused."""

from __future__ import annotations

import functools
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli.main import root
from headrace.config.explain import known_keys
from headrace.config.load import ConfigReading, load_config, read_config
from headrace.errors import ConfigError
from headrace_devkit.devcluster.certificates import Authority
from headrace_dialects.light4j.key_table import ROWS
from headrace_dialects.light4j.placeholders import typed
from headrace_dialects.light4j.translation import CONVERSIONS, setting_path
from headrace_queries.standing import problems_of
from yaml_table import table

SETS = Path(__file__).with_name("light4j")
WRONG = table(__file__, "wrong")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a key with its certificate, and two stores of Java."""
    folder = tmp_path_factory.mktemp("stores")
    app = Authority(folder, "ca").issue("app")
    (folder / "both.pem").write_bytes(app.key.read_bytes() + app.certificate.read_bytes())
    (folder / "both.pem").chmod(0o600)
    for name in ("old.keystore", "old.truststore"):
        (folder / name).write_bytes(b"\xfe\xed\xfe\xed\0\0")
    return folder


@pytest.fixture
def folder(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder `d` with these stores."""
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    for file in stores.iterdir():
        Path("d", file.name).symlink_to(file)
    return Path("d")


def written(folder: Path, case: dict[str, Any]) -> ConfigReading:
    """Write the files of a case, and return what is read."""
    for name in case.keys() - {"env", "mode", "says", "gives", "without effect"}:
        Path(folder, name).write_text(case[name])
        Path(folder, name).chmod(case.get("mode", 0o600))
    return read_config(folder, case.get("env", {}), problems_of)


@pytest.mark.parametrize("name", table(__file__, "sets"))
def test_a_sample_set_starts_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it sets, what has no effect, and the same from the file that `--import` writes."""
    monkeypatch.chdir(SETS)
    expected = table(__file__, "sets")[name]
    read = read_config(Path(f"{name}:kafka"), {})
    assert (read.problems, read.tree) == ([], expected["gives"])
    assert [remark.partition(", because ")[0] for remark in read.remarks] == expected["without effect"]
    checked = CliRunner().invoke(root, ["config", "check", "-c", f"{name}:kafka"])
    assert (checked.exit_code, checked.stderr) == (0, "".join(f"warning: {remark}\n" for remark in read.remarks))
    done = CliRunner().invoke(root, ["config", "show", "-c", f"{name}:kafka", "--import"])
    file = tmp_path / "headrace.yaml"
    file.write_text(done.stdout)
    apart = {"audit": ..., "state_dir": ...}  # relative to the file, or to the current folder
    assert read.config
    assert load_config(file, {}).model_copy(update=apart) == read.config.model_copy(update=apart)


@pytest.mark.parametrize(("case", "says"), [(case, case["says"]) for case in WRONG], ids=range(1, len(WRONG) + 1))
def test_what_a_folder_may_not_say_is_refused(folder: Path, case: dict[str, Any], says: list[str]) -> None:
    """File, line and key, the cause, and what to write; never a secret."""
    try:
        problems = written(folder, case).problems
    except ConfigError as cause:
        problems = [cause.description]
    for problem, said in zip(problems, says, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, said.split("..."))), problem, re.DOTALL), problem
        assert "c4nary" not in problem


@pytest.mark.parametrize("name", table(__file__, "right"))
def test_values_reach_their_settings(folder: Path, name: str) -> None:
    """Placeholders, orders of injection, conversions and switches of hooks."""
    case = table(__file__, "right")[name]
    read = written(folder, case)
    assert read.problems == []
    for path, value in case["gives"].items():
        node: Any = read.tree
        for part in path.split("/"):
            node = node.get(part) if isinstance(node, dict) else node
        assert node == value or fnmatch(str(node), str(value)), path
    for remark, pattern in zip(read.remarks, case.get("without effect", read.remarks), strict=True):
        assert remark == pattern or fnmatch(remark, pattern)


def test_every_row_of_the_table_names_settings_that_exist() -> None:
    """Or has a reason; and no row is there twice."""
    assert len({row[:2] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        for target in row.targets:
            *section, name = setting_path(target)
            if "properties" not in (name, *section[-1:]):
                assert name in known_keys(tuple(section)), target
        assert row.targets or row.why_nothing or row.why_refused or row.file in ("service", "config"), row


def test_a_folder_without_a_key_has_the_default_of_the_table(folder: Path) -> None:
    """That of light-4j, or the one that the row names as different."""
    hooks = "[ProducerStartupHook, ActiveConsumerStartupHook, ReactiveConsumerStartupHook, KsqldbConsumerStartupHook]"
    Path(folder, "service.yml").write_text(f"com.networknt.server.StartupHookProvider: {hooks}")
    config = read_config(folder, {"HEADRACE__TABLES__TEST_STREAM": "{topic: t}"}).config
    assert config
    tree = config.model_dump()
    tree["producer"]["properties"] = config.producer.client_properties
    for row in (row for row in ROWS if row.how != "special" and row.applied != "login"):
        for path in map(setting_path, row.targets):
            found: Any = functools.reduce(lambda node, part: (node or {}).get(part), path, tree)
            if hasattr(found, "get_secret_value"):
                found = found.get_secret_value()
            expected = CONVERSIONS.get(row.how, lambda value: value)(typed(row.here or row.default))
            assert found == expected or (not found and (row.here or not row.default)), row


@pytest.mark.parametrize(
    "value", ["3", "-1.5", ".inf", "[]", "[{a: 1}, b]", "{a: {b: 1}}", "''", "a:b", "yes", "2026-01-01"]
)
def test_a_value_of_any_kind_is_not_a_defect(folder: Path, value: str) -> None:
    """Each key of each file has it."""
    for file in {row.file for row in ROWS} - {"service", "config"}:
        keys = sorted((row.key for row in ROWS if row.file == file), key=lambda key: key.startswith("properties."))
        lines = [f"{key}: {value}".replace("properties.", "  ") for key in keys if key != "*"]
        first = next((number for number, line in enumerate(lines) if line[0] == " "), len(lines))
        Path(folder, f"{file}.yml").write_text("\n".join([*lines[:first], "properties:", *lines[first:]]))
    for hooks in (
        "ReactiveConsumerStartupHook, ProducerStartupHook",
        "ActiveConsumerStartupHook, KsqldbConsumerStartupHook",
    ):
        Path(folder, "service.yml").write_text(f"com.networknt.server.StartupHookProvider: [{hooks}]")
        assert read_config(folder, {"HEADRACE__TABLES__T": "{topic: t}"}, problems_of).problems


def test_the_file_that_import_writes_holds_no_secret(folder: Path) -> None:
    """It names the variables that have them."""
    login = "kafka-producer.username: ann\nkafka-producer.schema.registry.url: https://r"
    Path(folder, "values.yml").write_text(login)
    env = {"KAFKA_PRODUCER_PASSWORD": "c4nary"}
    done = CliRunner().invoke(root, ["config", "show", "-c", "d", "--import"], env=env)
    assert done.exit_code == 0, done.stderr
    assert "c4nary" not in done.stdout
    for variable in ("KAFKA_SECURITY_SASL_PASSWORD", "SCHEMA_REGISTRY_PASSWORD"):
        assert f"# Set the variable {variable} before the start." in done.stdout
    Path("headrace.yaml").write_text(done.stdout)
    names = dict.fromkeys(("KAFKA_SECURITY_SASL_PASSWORD", "SCHEMA_REGISTRY_PASSWORD"), "c4nary")
    sasl = load_config(Path("headrace.yaml"), names).kafka.security.sasl
    assert sasl
    assert sasl.password.get_secret_value() == "c4nary"
