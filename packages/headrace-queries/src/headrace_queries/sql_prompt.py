"""The prompt of `headrace sql`: lines become statements, with history and completion on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Final

import click

from headrace.cli.output import print_rows
from headrace.errors import HeadraceError
from headrace.runtime.cache import cache_folder
from headrace_queries.sql_sources import SqlSource

_PROMPT: Final = "headrace> "
_CONTINUED: Final = "     ...> "
_HISTORY_LINES: Final = 1_000
_KEYWORDS: Final = (
    "SELECT",
    "FROM",
    "WHERE",
    "GROUP",
    "BY",
    "ORDER",
    "LIMIT",
    "JOIN",
    "ON",
    "USING",
    "AS",
    "AND",
    "OR",
)
_FUNCTIONS: Final = ("count", "sum", "avg", "min", "max")
_RESERVED: Final = {*_KEYWORDS, "OFFSET", "TABLE", "UNION", "CASE", "END", "TO", "USER", "AT", "NOT", "DISTINCT"}
_HELP: Final = "statements end with ; \\d lists tables, \\d NAME the columns of one, \\q ends"


class SqlPrompt:
    """Reads statements from standard input until its end or `\\q`."""

    def __init__(self, source: SqlSource, ask: Callable[[str], None]) -> None:
        """Take what has tables, and the function that runs a statement and prints its rows."""
        self._source = source
        self._ask = ask
        self._lines: list[str] = []
        """Of the statement that is being typed."""

    def run(self) -> None:
        """Run each statement.

        Raises:
            HeadraceError: A statement is rejected, and standard input is not a terminal.
        """
        if not sys.stdin.isatty():
            for line in sys.stdin:
                if not self.take(line):
                    return
            self._run_rest()
            return
        with self._line_editing():
            click.echo(_HELP, err=True)
            while self._take_typed():
                pass

    def _take_typed(self) -> bool:
        try:
            return self.take(input(_CONTINUED if self._lines else _PROMPT))
        except EOFError:
            click.echo()
            return False
        except KeyboardInterrupt:  # ends the statement, or what was typed of it
            click.echo("interrupted", err=True)
        except HeadraceError as error:
            click.echo(error.description, err=True)
        self._lines = []
        return True

    def take(self, line: str) -> bool:
        """Take a line, and run the statement that it completes; return False if it ends the prompt."""
        words = line.split()
        if not self._lines and (not words or words[0].startswith("\\")):
            return self._run_command(words)
        self._lines.append(line.rstrip("\n"))
        if line.rstrip().endswith(";"):
            self._run_rest()
        return True

    def _run_rest(self) -> None:
        statement = "\n".join(self._lines)
        self._lines = []
        if statement.strip():
            self._ask(statement)

    def _run_command(self, words: list[str]) -> bool:
        if not words:
            return True
        if words[0] == "\\q":
            return False
        if words[0] != "\\d":
            click.echo(f"{words[0]} is not known: {_HELP}", err=True)
        elif len(words) > 1:
            name = words[1].strip('";')
            print_rows([{"column": column, "type": kind} for column, kind in self._source.columns(name)], "text", "")
        else:
            print_rows([{"table": name} for name in self._source.tables()], "text", "no tables here")
        return True

    def complete(self, text: str, number: int) -> str | None:
        """Return a word that begins with a text, by its number; None after the last."""
        known = self._source.known
        columns = [name for columns in known.values() for name, _ in columns]
        names = sorted({quoted_if_needed(name) for name in (*known, *columns)})
        found = [word for word in (*names, *_KEYWORDS, *_FUNCTIONS) if word.lower().startswith(text.lower())]
        return found[number] if number < len(found) else None

    @contextlib.contextmanager
    def _line_editing(self) -> Iterator[None]:
        """Use the history of the prompts before, and complete names, where Python has readline."""
        try:
            import readline
        except ImportError:
            yield
            return
        file = cache_folder() / "sql_history"
        with contextlib.suppress(OSError):
            readline.read_history_file(file)
        readline.set_history_length(_HISTORY_LINES)
        readline.set_completer(self.complete)
        readline.set_completer_delims(" \t\n,()=<>+-*/;")
        readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
        with contextlib.suppress(HeadraceError):  # without names there is less to complete
            self._source.tables()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(file)


def quoted_if_needed(name: str) -> str:
    """Return a name as a statement has it."""
    plain = name.isidentifier() and name.isascii() and name.upper() not in _RESERVED
    return name if plain else '"' + name.replace('"', '""') + '"'
