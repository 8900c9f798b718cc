"""Global options: declared and explained once, taken anywhere, refused where they have no use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import BashComplete

from headrace.cli.global_options import OPTIONS, GlobalOption, HeadraceCommand, HeadraceGroup, uses
from headrace.cli.main import root
from tests.command_line import headrace

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


def test_what_stands_behind_two_dashes_is_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    """`run` refuses `--output` before them only."""
    assert headrace("run", "-c", "none.yaml", "--", "nosuchprogram", "--output", "json", "-c", "x") == 2
    assert "cannot start nosuchprogram" in capsys.readouterr().err
    assert headrace("run", "--output", "json", "--", "nosuchprogram") == 2
    assert "headrace run has no use for --output" in capsys.readouterr().err


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
