"""A Headrace process of its own, from a configuration given as a dictionary."""

import os
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from headrace_devkit.devcluster.certificates import write_file
from headrace_devkit.devcluster.jvm_server import Server
from headrace_devkit.devcluster.ports import free_ports


class HeadraceProcess:
    """`headrace run` as a child process; it dies with the thread that starts it."""

    logins: ClassVar[dict[str, Mapping[str, Any]]] = {}
    """Settings that replace those of a section `kafka`, by its `bootstrap_servers`: how processes log in there."""

    def __init__(self, config: Mapping[str, Any], folder: Path, env: Mapping[str, str] | None = None) -> None:
        """Prepare a process that works and logs in `folder`.

        What the config does not name is its own: a free `http.port`, and a `control.topic`, so that processes on one
        broker are a deployment only if the test wants that.
        """
        self._folder = folder
        kafka = config.get("kafka", {})
        login = self.logins.get(kafka.get("bootstrap_servers", ""))
        self._config = {
            **config,
            **({"kafka": {**kafka, **login}} if login else {}),
            "http": {"port": free_ports(1)[0], **config.get("http", {})},
            "control": {"topic": f"_headrace-control-{uuid.uuid4().hex[:12]}", **config.get("control", {})},
        }
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.server = Server("Headrace", folder / "headrace.log")

    @property
    def url(self) -> str:
        """Base URL of its HTTP API."""
        http = self._config["http"]
        return f"http://{http.get('host', '127.0.0.1')}:{http['port']}"

    @property
    def output(self) -> str:
        """Everything it has printed, log and standard output together."""
        return self.server.log.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """How it ended, None while it runs."""
        return self.server.exit_code

    def start(self) -> None:
        """Start it without waiting; also again, after it has ended."""
        import yaml  # here, because the pytest plugin is loaded in every test run where Headrace is installed

        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / "headrace.yaml"
        write_file(file, yaml.safe_dump(self._config).encode(), 0o600)  # it may hold passwords
        self.server.log.write_text("")
        self._launch(["run", "-c", str(file)])

    def _launch(self, words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "headrace.cli.main", *words]
        self.server.start(command, detached=False, cwd=self._folder, env=self._env)

    def wait_ready(self, limit_seconds: float = 120.0) -> None:
        """Wait for the line `ready`.

        Raises:
            EnvironmentProblem: It ended, or the time is up; the text ends with the log's last lines.
        """
        ready = re.compile(r"^ready http=", re.MULTILINE)
        self.server.wait_until(lambda: bool(ready.search(self.output)), limit_seconds)

    def terminate(self, limit_seconds: float = 90.0) -> int | None:
        """SIGTERM, wait for the drain up to the limit, then SIGKILL. Returns the exit code (-9: it was killed)."""
        self.server.stop(limit_seconds)
        return self.exit_code

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        self.server.kill()
