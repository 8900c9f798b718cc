"""What the tests of least rights share: the page's rows, a user with exactly these rights, and the use of a feature."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import KafkaException
from confluent_kafka.admin import AclBinding, AclBindingFilter, AclOperation, ResourceType  # type: ignore[attr-defined]

from headrace_devkit.devcluster.certificates import write_file
from headrace_devkit.devcluster.security import allowed
from headrace_devkit.testing import HeadraceProcess
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import SecuredCluster
from tests.active_client import Response, send

PAGE = Path(__file__).parents[1] / "docs" / "security-rights.md"
KINDS = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional id": ResourceType.TRANSACTIONAL_ID,
    "cluster": ResourceType.BROKER,
}
OWN_NAMES = re.compile(
    r"orders|tracking|weights|headrace-host|headrace\.scale|_headrace-(?:idempotency|control)|sidecar-audit"
)
LIMIT_SECONDS = 60.0


class Row(NamedTuple):
    """A right, as the page lists it."""

    operation: str
    kind: str
    name: str
    purpose: str

    @property
    def at_start(self) -> bool:
        return self.purpose.endswith("at start")

    def binding(self, user: str, key: str) -> AclBinding:
        operation = AclOperation[re.sub(r"(?<!^)(?=[A-Z])", "_", self.operation).upper()]
        name = named(self.name, key).removesuffix("*") or "kafka-cluster"
        return allowed(user, KINDS[self.kind], name, operation, prefix=self.name.endswith("*"))

    def sentence(self, user: str, key: str) -> str:
        resource = f"{self.kind} {named(self.name, key).removesuffix('*')}".rstrip()
        return f"User:{user} has no right {self.operation} on {resource}"


def named(name: str, key: str) -> str:
    """Return the name that a feature uses for one of the page."""
    return OWN_NAMES.sub(rf"\g<0>-{key}", name)


def rows_of(*titles: str) -> list[Row]:
    """Return the rights of sections of the page."""
    page = PAGE.read_text()
    text = "".join(page.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in titles)
    found = re.findall(r"^\| (\w+) \| (topic|group|transactional id|cluster)(?: `(.+?)`)? \| (.+?) \|$", text, re.M)
    return [Row(*row) for row in found]


def assert_named(response: Response) -> None:
    """A response that names a missing right has the status for it."""
    if response.status >= 400 and "has no right" in json.dumps(response.body):
        assert response.status == 403, response


class RightsScenario:
    """The secured cluster with one user, and a process of that user."""

    def __init__(
        self, secured: SecuredCluster, key: str, rows: list[Row], folder: Path, headrace: Any, backend: Any
    ) -> None:
        self.secured, self.key, self.rows, self.folder = secured, key, rows, folder
        self.headrace, self.backend = headrace, backend
        self.user = f"user-{key}"
        self.site = Scenario(secured.cluster.bootstrap_servers, folder)
        self.process: HeadraceProcess | None = None
        self._admin = secured.admin
        self.password = secrets.token_urlsafe(16)
        write_file(secured.security.folder / f"{self.user}.password", self.password.encode(), 0o600)
        secured.set_password(self.user, self.password)
        for row in self.rows:
            if row.kind == "topic" and row.operation != "Create" and not row.name.endswith("*"):
                self.create_topic(row.name)
        self.give(*self.rows)

    def __call__(self, name: str) -> str:
        return named(name, self.key)

    def create_topic(self, name: str) -> None:
        """Create the topic for one of the page."""
        compact = {"cleanup.policy": "compact"} if name.startswith("_headrace") else {}
        self.secured.cluster.create_topic(self(name), 1, compact)

    def delete_topic(self, name: str) -> None:
        """Delete the topic for one of the page, if there is one."""
        for future in self._admin.delete_topics([self(name)], operation_timeout=LIMIT_SECONDS).values():
            with contextlib.suppress(KafkaException):
                future.result(LIMIT_SECONDS)

    def consumer(self, **more: Any) -> dict[str, Any]:
        """Return the settings of a reactive consumer."""
        names = {"topics": [self("orders")], "group": self("tracking"), "value_format": "json"}
        return {**names, "backend": {"url": self.backend.url}, **more}

    def file(self, **more: Any) -> Path:
        """Write the user's headrace.yaml for commands."""
        file = self.folder / "command.yaml"
        write_file(file, json.dumps(self.config(**more)).encode(), 0o600)
        return file

    def give(self, *rows: Row) -> None:
        """Give the user rights."""
        self.secured.grant(*(row.binding(self.user, self.key) for row in rows))

    def take(self, row: Row) -> None:
        """Take a right from the user."""
        one = row.binding(self.user, self.key)
        pattern = (one.restype, one.name, one.resource_pattern_type, one.principal, one.host)
        filters = [AclBindingFilter(*pattern, one.operation, one.permission_type)]
        for future in self._admin.delete_acls(filters).values():
            assert len(future.result(LIMIT_SECONDS)) == 1

    def config(self, **more: Any) -> dict[str, Any]:
        """Return the user's headrace.yaml."""
        kafka = {"create_topics": False, **self.secured.login("SCRAM-SHA-512", self.user)}
        control = {"topic": self("_headrace-control")}
        return {"kafka": {**kafka, **more.pop("kafka", {})}, "control": control, **more}

    def run(self, *, wait: bool = True, **more: Any) -> None:
        """Start the process."""
        self.process = self.headrace(self.config(**more), wait=wait)

    @property
    def url(self) -> str:
        assert self.process
        return self.process.url

    def texts(self, response: str) -> str:
        """Return everything that the process reports now."""
        assert self.process
        assert self.process.exit_code is None, self.process.output
        try:
            ready = json.dumps(send("GET", f"{self.process.url}/health/readiness").body)
        except OSError:  # it is starting
            ready = ""
        return f"{response}\n{ready}\n{self.process.output}"


class Feature:
    """Uses a feature again and again: `trigger` begins the use of a number, `done` returns whether it has worked."""

    titles: tuple[str, ...] = ()
    """Sections of the page that list its rights."""
    limit_seconds = LIMIT_SECONDS
    more: Mapping[str, Any] = {}
    repeats = True
    """Whether a use that was refused is repeated by its caller; otherwise the process must finish it by itself."""

    def __init__(self, scenario: RightsScenario) -> None:
        self.scenario = scenario
        self.response = ""

    def start(self) -> None:
        self.scenario.run(**self.more)

    def restart(self) -> None:
        """Start again, without waiting for readiness."""
        assert self.scenario.process
        self.scenario.process.terminate()
        self.scenario.process.start()

    def trigger(self, number: int) -> None:
        raise NotImplementedError

    def done(self, number: int) -> bool:
        raise NotImplementedError

    def texts(self) -> str:
        return self.scenario.texts(self.response)


class Posted(Feature):
    """A request that is answered 200."""

    status = 0

    def headers(self, number: int) -> dict[str, str]:
        return {}

    def body(self, number: int) -> Any:
        return {"records": [{"value": number}]}

    def path(self) -> str:
        return f"/producers/{self.scenario('orders')}"

    def trigger(self, number: int) -> None:
        self.status = 0
        try:
            response = send("POST", self.scenario.url + self.path(), self.body(number), self.headers(number))
        except OSError:  # it is starting
            return
        self.status, self.response = response.status, json.dumps(response.body)
        assert_named(response)

    def done(self, number: int) -> bool:
        return self.status == 200


class Written(Feature):
    """Records that the process reads by itself, and must end somewhere."""

    repeats = False

    def trigger(self, number: int) -> None:
        self.scenario.site.write_json(self.scenario("orders"), {"n": number})

    def arrived(self, topic: str, number: int) -> bool:
        return any(json.loads(record.value or b"{}").get("n") == number for record in self.scenario.site.records(topic))
