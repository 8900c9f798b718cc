"""What needs a person, from the responses of the HTTP API: worst first, each with the reason and what helps.

For commands and pages that show a process. The responses are those of `PARTS`; a part that is missing is not judged.
"""

from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Any, Final, Literal, NamedTuple

PARTS: Final[Mapping[str, str]] = {
    "readiness": "/health/readiness",
    "consumers": "/adm/reactive-consumers",
    "pipelines": "/adm/pipelines",
    "tables": "/tables",
    "dead_letters": "/adm/dead-letters",
    "instances": "/adm/consumers",
    "cluster": "/cluster",
}
"""Parts of the status of a process, and the path of each. `readiness` comes first: the last ones need Kafka."""
Severity = Literal["outage", "stopped", "degraded", "paused"]
_ORDER: Final = ("outage", "stopped", "degraded", "paused")
_AUDIT: Final = "audit"
"""A service that is ready also while it loses events; then it has a reason."""


class Need(NamedTuple):
    """Something that a person should look at."""

    severity: Severity
    """`outage`: everything waits; `stopped`: a part does no work; `degraded`: work is left or slow; `paused`: a person
    has stopped it."""
    about: str
    """Kind and name for people: `reactive consumer billing`."""
    why: str
    """One sentence; it may have text from outside."""
    command: str
    """The command that shows more or helps."""
    kind: str = ""
    """`consumer`, `function`, `pipeline`, `table` or `topic`; empty for a service."""
    name: str = ""
    """The name of that, as paths have it."""


def needs_of(parts: Mapping[str, Any]) -> list[Need]:
    """Return what needs a person, worst first, then by name."""
    found = [
        *_of_services(parts),
        *(need for one in _items(parts, "consumers") for need in _of_consumer(one)),
        *(need for one in _items(parts, "pipelines") for need in _of_pipeline(one)),
        *(need for one in _items(parts, "tables") for need in _of_table(one)),
        *(need for one in _items(parts, "dead_letters", "topics") for need in _of_dead_letters(one)),
    ]
    return sorted(found, key=lambda need: (_ORDER.index(need.severity), need.about))


def kafka_outage(parts: Mapping[str, Any]) -> str:
    """Return why Kafka does not respond to the process, as its readiness says it; empty if it does."""
    services = (parts.get("readiness") or {}).get("services", {})
    return next((str(one["reason"]) for name, one in services.items() if _is_kafka(name) and not one["ready"]), "")


def _items(parts: Mapping[str, Any], part: str, key: str = "") -> list[Mapping[str, Any]]:
    return list((parts.get(part) or {}).get(key or part, ()))


def _is_kafka(service: str) -> bool:
    return service == "kafka" or service.startswith("kafka ")


def _of_services(parts: Mapping[str, Any]) -> Iterator[Need]:
    names = {f"{kind} {one['name']}" for kind in ("reactive", "function") for one in _items(parts, "consumers")}
    names |= {f"{kind[:-1]} {one['name']}" for kind in ("pipelines", "tables") for one in _items(parts, kind)}
    for name, one in (parts.get("readiness") or {}).get("services", {}).items():
        if name == _AUDIT and one["reason"]:
            yield Need("degraded", name, one["reason"], "headrace doctor")
        if one["ready"]:
            continue
        if _is_kafka(name):
            yield Need("outage", name, one["reason"], "headrace doctor")
        elif not any(name == known or name.startswith(f"{known} ") for known in names):
            yield Need("stopped", name, one["reason"], "headrace doctor")


def _of_consumer(one: Mapping[str, Any]) -> Iterator[Need]:
    about, look = f"{one['kind']} consumer {one['name']}", f"headrace reactive status {quote(one['name'])}"
    of = "consumer", one["name"]
    if one["kind"] == "function":
        about, of = f"function {one['name']}", ("function", one["name"])
    if one["paused"]:
        yield Need("paused", about, one["why"], f"headrace reactive resume {quote(one['name'])}", *of)
    elif one.get("kafka"):
        return  # the outage is named once
    elif one["breaker"]["state"] != "closed":
        yield Need("stopped", about, one["why"] or one["breaker"]["why"], look, *of)
    elif one["why"]:
        yield Need("stopped", about, one["why"], look, *of)


def _of_pipeline(one: Mapping[str, Any]) -> Iterator[Need]:
    about, name, of = f"pipeline {one['name']}", quote(one["name"]), ("pipeline", one["name"])
    if one["state"] in ("failed", "stopped", "paused"):
        severity: Severity = "stopped" if one["state"] == "failed" else "paused"
        yield Need(severity, about, one["reason"] or f"it is {one['state']}", f"headrace pipeline resume {name}", *of)
    elif one["reason"] and one["state"] != "starting":
        yield Need("stopped", about, one["reason"], f"headrace pipeline status {name}", *of)


def _of_table(one: Mapping[str, Any]) -> Iterator[Need]:
    if one["state"] in ("full", "refused", "failing"):
        word = "rebuild" if one["state"] == "refused" else "show"
        command = f"headrace tables {word} {quote(one['name'])}"
        yield Need("stopped", f"table {one['name']}", one["reason"], command, "table", one["name"])


def _of_dead_letters(one: Mapping[str, Any]) -> Iterator[Need]:
    if one["left"] and not one["topic"].endswith(".quarantine"):  # these were put aside on purpose
        left = "1 dead letter is" if one["left"] == 1 else f"{one['left']} dead letters are"
        why = f"{left} left, the newest of {one['newest']}" if one["newest"] else f"{left} left"
        command = f"headrace dlq show {quote(one['topic'])} --state left"
        yield Need("degraded", f"topic {one['topic']}", why, command, "topic", one["topic"])
