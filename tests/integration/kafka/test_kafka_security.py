"""Every login and certificate of `kafka.security`, through the running product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.testing.secured import SecuredCluster
from tests.active_client import send


def _section(cluster: SecuredCluster, way: str) -> dict[str, Any]:
    if way in ("certificate", "store"):
        return cluster.certificate(store=way == "store")
    return cluster.login(way)


@pytest.mark.parametrize("way", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "certificate", "store"])
def test_every_login_produces(kafka_secured: SecuredCluster, headrace: Callable[..., Any], way: str) -> None:
    """A record is written, whatever the login."""
    topic = f"login-{way.lower()}"
    kafka_secured.cluster.create_topic(topic)
    process = headrace({"kafka": _section(kafka_secured, way)})
    response = send("POST", f"{process.url}/producers/{topic}", {"records": [{"value": 1}]})
    assert (response.status, response.body["offsets"]) == (200, [{"partition": 0, "offset": 0}])
