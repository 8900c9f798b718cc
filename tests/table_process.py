"""A running Headrace with tables: its requests, the states of its tables, and its engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_devkit.testing import HeadraceProcess
from headrace_devkit.testing.scenario import Scenario


class TableResponse(NamedTuple):
    """A response to a statement."""

    status: int
    body: Any
    seconds: float
    retry_after: int = 0

    @property
    def rows(self) -> list[Any]:
        """The rows as lists of their cells."""
        assert self.status == 200, self.body
        return [list(row.values()) for row in self.body["rows"]]


class TableProcess:
    """A process as a caller of its tables sees it."""

    def __init__(self, process: HeadraceProcess) -> None:
        self.process = process

    def send(self, method: str, path: str, body: bytes | None = None, token: str = "") -> TableResponse:
        """Send a request, with the token that a principal of this name has."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {token:->16}"} if token else {}
        request = urllib.request.Request(f"{self.process.url}{path}", body, headers, method=method)
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=90) as response:
                text = response.read()
                return TableResponse(response.status, json.loads(text or "null"), time.monotonic() - began)
        except urllib.error.HTTPError as error:
            pause = int(error.headers.get("Retry-After", 0))
            return TableResponse(error.code, json.loads(error.read()), time.monotonic() - began, pause)
        except urllib.error.URLError as error:
            raise ConnectionError(error.reason) from error

    def ask(self, sql: str, token: str = "", **more: Any) -> TableResponse:
        """Run a statement; `more` are further fields of the request."""
        return self.send("POST", "/query", json.dumps({"sql": sql, **more}).encode(), token)

    def table(self, name: str) -> Mapping[str, Any]:
        """Return the state of a table; empty while it has none."""
        found = self.send("GET", f"/tables/{name}")
        return found.body if found.status == 200 else {}

    def wait_for(self, sql: str, rows: list[Any], token: str = "") -> None:
        """Wait until a statement has these rows."""
        last: list[TableResponse] = []

        def has_rows() -> bool:
            last[:] = [self.ask(sql, token)]
            return last[0].status == 200 and last[0].rows == rows

        Scenario.wait_until(has_rows, f"{sql} to have {rows}")

    def wait_state(self, name: str, state: str) -> Mapping[str, Any]:
        """Wait until a table is in a state, and return what is said of it."""
        Scenario.wait_until(lambda: self.table(name).get("state") == state, f"table {name} to be {state}")
        return self.table(name)

    @property
    def engine(self) -> int:
        """Process id of the engine that keeps its tables; 0 while there is none."""
        return self._engine(statements=False)

    @property
    def statements_engine(self) -> int:
        """Process id of the engine that runs statements of callers; 0 while there is none."""
        return self._engine(statements=True)

    def _engine(self, *, statements: bool) -> int:
        assert self.process.server.id
        pid = self.process.server.id.pid
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                    if "headrace_queries.engine" in words and ("statements" in words) == statements:
                        return int(child)
        return 0

    def kill_engine(self) -> None:
        """SIGKILL the engine, once there is one."""

        def kill() -> bool:
            with contextlib.suppress(ProcessLookupError):
                if engine := self.engine:
                    os.kill(engine, signal.SIGKILL)
                    return True
            return False

        Scenario.wait_until(kill, "an engine")


def principals(scopes: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the section `security` in which each name has a token and these scopes."""
    found = {name: {"token": f"{name:->16}", "scopes": each} for name, each in scopes.items()}
    return {"mode": "token", "principals": found}
