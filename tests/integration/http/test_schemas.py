"""Schemas over HTTP, on a real registry."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from headrace_devkit.testing import MakeTopic, Registry, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import send


def test_schemas_are_those_of_topics_that_the_caller_may_read(
    schema_registry: Registry, site: Scenario, headrace: StartHeadrace, topic: MakeTopic
) -> None:
    """Subjects in pages by name; the versions of one, the newest first, with references and compatibility."""
    name, registry = topic(), schema_registry.url
    table = yaml.safe_load(Path(__file__).with_name("schemas.yaml").read_text().replace("T", name))
    for version in table["registered"]:
        assert send("POST", f"{registry}/subjects/{version.pop('subject')}/versions", version).status == 200
    send("PUT", f"{registry}/config/{name}-value", {"compatibility": "FULL"})
    process = headrace({**site.config, "schema_registry": {"url": registry}, "security": table["security"]})
    for path, by, status, expected in table["requests"]:
        found = send("GET", f"{process.url}/schemas{path}", None, {"Authorization": f"Bearer {by:->16}"})
        body = json.loads(re.sub(r'"id": [1-9]\d*, ', "", json.dumps(found.body)))
        assert (found.status, expected and body) == (status, expected), (path, by)
