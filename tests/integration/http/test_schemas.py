"""Schemas over HTTP, on a real registry."""

from __future__ import annotations

import json
from typing import Any

from tests.active_client import send

OLD, NEW, NUMBER = (
    json.dumps({"type": "record", "name": name, "fields": fields}, separators=(",", ":"))
    for name, fields in (
        ("Order", []),
        ("Order", [{"name": "n", "type": ["null", "Number"], "default": None}]),
        ("Number", []),
    )
)


def test_schemas_are_those_of_topics_that_the_caller_may_read(
    kafka: Any, schema_registry: Any, headrace: Any, topic: Any
) -> None:
    """Subjects in pages by name; the versions of one, the newest first, with references and compatibility."""
    name = topic()
    value, hidden = f"{name}-value", f"hidden.{name}"
    references = [{"name": "Number", "subject": hidden, "version": 1}]
    for subject, text, more in (
        (hidden, NUMBER, []),
        (value, OLD, []),
        (value, NEW, references),
        (f"{name}-key", OLD, []),
    ):
        body = {"schema": text, "references": more}
        assert send("POST", f"{schema_registry.url}/subjects/{subject}/versions", body).status == 200
    send("PUT", f"{schema_registry.url}/config/{value}", {"compatibility": "FULL"})
    users = {
        who: {"token": f"{who:->16}", "scopes": [scope]}
        for who, scope in (("ops", "admin"), ("ann", f"consume:{name}"))
    }
    process = headrace(
        {
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "schema_registry": {"url": schema_registry.url},
            "security": {"mode": "token", "principals": users},
        }
    )

    def ask(path: str, by: str = "ann") -> Any:
        return send("GET", f"{process.url}/schemas{path}", None, {"Authorization": f"Bearer {by:->16}"})

    def names(found: Any) -> list[str]:
        return [one["subject"] for one in found.body["subjects"]]

    found = ask("")
    assert (found.body["total"], names(found)) == (2, [f"{name}-key", value])
    one = {"topic": name, "version": 2, "type": "AVRO", "compatibility": "FULL", "problem": ""}
    assert found.body["subjects"][1].items() >= one.items()
    assert names(ask(f"?contains={name.upper()}", "ops")) == [hidden, f"{name}-key", value]
    page = ask(f"?contains={name}&offset=1&limit=1", "ops")
    assert (page.body["total"], names(page)) == (3, [f"{name}-key"])
    assert names(ask(f"?prefix={name}-v", "ops")) == [value]
    shown = ask(f"/{value}").body
    assert (shown["topic"], shown["compatibility"], shown["total"]) == (name, "FULL", 2)
    assert [(one["version"], one["schema"], one["references"]) for one in shown["versions"]] == [
        (2, NEW, references),
        (1, OLD, []),
    ]
    assert shown["versions"][0]["id"] == found.body["subjects"][1]["id"]
    assert [one["version"] for one in ask(f"/{value}?offset=1").body["versions"]] == [1]
    assert [ask(f"/{hidden}").status, ask(f"/{hidden}x", "ops").status] == [403, 404]
