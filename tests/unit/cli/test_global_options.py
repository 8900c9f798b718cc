"""Global options: declared and explained once, taken anywhere, refused where they have no use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from headrace.cli.global_options import OPTIONS, GlobalOption, HeadraceCommand, HeadraceGroup, uses
from headrace.cli.main import root
from headrace.kafka import Admin
from tests.command_line import headrace
from yaml_table import table

FILE = Path(__file__)
REFERENCE = FILE.parents[3] / "docs" / "reference" / "cli.md"
VALUES = {
    "config": "c.yaml",
    "bootstrap_servers": "k:1",
    "schema_registry": "http://r",
    "urls": "http://h:1",
    "ca": str(FILE),
    "output": "json",
    "debug": None,
}
SEEN = {**VALUES, "config": Path("c.yaml"), "ca": FILE, "urls": ("http://h:1",), "debug": True}


def below(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from below(command, f"{path}{name} ")


def words_of(option: GlobalOption, spelling: str) -> list[str]:
    value = VALUES[str(option.name)]
    return [spelling] if value is None else [spelling, value]


def spelled() -> Iterator[tuple[GlobalOption, str]]:
    yield from ((option, spelling) for option in OPTIONS for spelling in option.opts)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A command `topics probe` that keeps the values of the global options that it was called with."""
    found: dict[str, Any] = {}

    @click.group(cls=HeadraceGroup)
    def topics() -> None:
        pass

    @topics.command()
    @click.argument("topic", required=False)
    @uses(*VALUES)
    def probe(topic: str | None, **values: Any) -> None:
        found.update(values)

    monkeypatch.setattr(type(root), "get_command", lambda *_: topics)
    return found


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize(("option", "spelling"), [*spelled()])
def test_each_is_taken_before_and_after_the_command(
    option: GlobalOption, spelling: str, place: int, seen: dict[str, Any]
) -> None:
    """Each spelling, at each place; the others have their defaults."""
    words = ["topics", "probe", "orders"]
    assert headrace(*words[:place], *words_of(option, spelling), *words[place:]) == 0
    name = str(option.name)
    others = {"output": "text", "urls": (), "debug": False}
    assert seen == {**dict.fromkeys(VALUES), **others, name: SEEN[name]}


def test_the_later_one_counts(seen: dict[str, Any]) -> None:
    """As when an alias of the shell has one already."""
    assert headrace("-b", "k:1", "topics", "-b", "k:2", "probe", "-bk:3", "--output=json") == 0
    assert (seen["bootstrap_servers"], seen["output"]) == ("k:3", "json")


@pytest.mark.parametrize("option", OPTIONS, ids=[str(one.name) for one in OPTIONS])
def test_a_command_without_use_for_it_refuses_it(option: GlobalOption, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command, before and after it, even if an argument is missing: nothing is ignored."""
    words, refusals = words_of(option, option.opts[0]), 0
    for path, command in below(root):
        used = getattr(command.callback, "global_options", ())
        if isinstance(command, click.Group) or option.name in (*used, "debug"):
            continue
        for line in ([*words, *path.split()], [*path.split(), *words]):
            assert headrace(*line) == 2
            assert (
                f"headrace {path} has no use for {max(option.opts, key=len)}: leave it out" in capsys.readouterr().err
            )
            refusals += 1
    assert (refusals == 0) == (option.name == "debug")


def test_without_a_command_there_is_no_use_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The words for a newcomer have no JSON; a traceback is always welcome."""
    assert headrace("--output", "json") == 2
    assert "headrace has no use for --output" in capsys.readouterr().err
    assert headrace("--debug") == 0


def test_variables_are_no_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They are of the shell, so a command without use for them ignores them."""
    monkeypatch.setenv("HEADRACE_URL", "http://h:1")
    monkeypatch.setenv("HEADRACE_TOKEN", "t")
    assert headrace("config", "schema") == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("words", [["topics", "list"], ["status", "--url", "http://127.0.0.1:9"]])
def test_only_sql_prints_rows_as_csv(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The formats of rows are of the command that prints rows."""
    assert headrace(*words, "--output", "csv") == 2
    assert "prints text or json, not csv: use headrace sql" in capsys.readouterr().err


def test_what_stands_behind_two_dashes_is_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    """`run` refuses `--output` before them only."""
    assert headrace("run", "-c", "none.yaml", "--", "nosuchprogram", "--output", "json", "-c", "x") == 2
    assert "cannot start nosuchprogram" in capsys.readouterr().err
    assert headrace("run", "--output", "json", "--", "nosuchprogram") == 2
    assert "headrace run has no use for --output" in capsys.readouterr().err


def test_each_is_explained_once() -> None:
    """In the help of `headrace`, and with it in the reference; the help of a command only names those that it uses."""
    page = REFERENCE.read_text()
    for option in OPTIONS:
        assert option.help
        assert " ".join(page.split()).count(option.help) == 1
        assert option in root.params
    shown = CliRunner().invoke(root, ["topics", "create", "--help"], prog_name="headrace").output
    assert shown.endswith("Global options (headrace --help): -c, -b, --output, --debug\n")
    assert "Kafka: host:port" not in shown


def test_no_command_has_an_option_of_its_own_with_the_same_name() -> None:
    """And each is of the class that takes global options."""
    taken = {spelling for _, spelling in spelled()}
    for path, command in below(root):
        assert isinstance(command, HeadraceCommand | HeadraceGroup), path
        own = [name for part in command.params if not isinstance(part, GlobalOption) for name in part.opts]
        assert not taken & {*own}, path


def completed(*words: str) -> list[str]:
    return [item.value for item in BashComplete(root, {}, "headrace", "").get_completions([*words[:-1]], words[-1])]


def test_the_completion_offers_them_where_they_have_a_use() -> None:
    """Before the command all of them; after it those that it uses; and their values."""
    every = {spelling for _, spelling in spelled()}
    assert every <= {*completed("-")}
    assert every <= {*completed("topics", "-")}
    assert every & {*completed("topics", "create", "-")} == {
        *("-c", "--config", "-b", "--bootstrap-servers", "--output", "--debug")
    }
    assert every & {*completed("dev", "down", "-")} == {"--debug"}
    assert "json" in completed("--output", "")
    assert "json" in completed("topics", "create", "--output", "")
    assert "create" in completed("-b", "k:1", "topics", "")


def test_names_of_topics_are_completed_from_the_cluster_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its address stands before the command."""
    asked: list[str] = []

    async def list_topics(admin: Admin) -> list[Any]:
        asked.append(admin.config.bootstrap_servers)
        return []

    monkeypatch.setattr(Admin, "list_topics", list_topics)
    completed("-b", "k:1", "topics", "describe", "o")
    completed("topics", "describe", "-b", "k:2", "o")
    assert asked == ["k:1", "k:2"]


@pytest.mark.parametrize(("words", "shown"), table(__file__, "second names"))
def test_a_second_name_is_the_same_command(words: str, shown: str) -> None:
    """Both names of a command that shows one thing, or lists all."""
    done = CliRunner().invoke(root, [*words.split(), "--help"], prog_name="headrace")
    assert done.output.startswith(f"Usage: headrace {shown} [OPTIONS]")


def test_a_list_and_a_description_are_one_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name, `topics describe` and `groups describe` list; `--all` describes each group."""
    monkeypatch.setattr(Admin, "list_topics", AsyncMock(return_value=[]))
    monkeypatch.setattr(Admin, "list_groups", AsyncMock(return_value=[]))
    for words in ("topics list", "topics describe"):
        assert headrace(*words.split(), "-b", "k:1") == 0
        assert capsys.readouterr().out == "no topics yet: headrace topics create NAME\n"
    for words, empty in (
        ("groups list", "consumer groups yet"),
        ("groups describe --all", "group has committed an offset yet"),
    ):
        assert headrace(*words.split(), "-b", "k:1") == 0
        assert capsys.readouterr().out == f"no {empty}\n"


def test_a_command_of_another_package_refuses_them_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of click's own class."""
    monkeypatch.setattr(type(root), "get_command", lambda *_: click.Command("topics", callback=lambda: None))
    assert headrace("topics") == 0
    assert headrace("--url", "http://h:1", "topics") == 2
    assert "has no use for --url" in capsys.readouterr().err
