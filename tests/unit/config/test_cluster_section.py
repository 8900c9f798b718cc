"""The section `cluster`: what several processes need to forward requests to each other."""

from __future__ import annotations

from headrace.config.cluster import ClusterConfig

SECRET = "x" * 32
COMPLETE = {"url": "https://one:8082/", "peers": ["https://one:8082", "https://two:8082/"], "secret": SECRET}


def test_a_complete_section() -> None:
    assert ClusterConfig().peers == []
    complete = ClusterConfig.model_validate(COMPLETE)
    assert (complete.url, complete.peers) == ("https://one:8082", ["https://one:8082", "https://two:8082"])
    assert SECRET not in repr(complete)
    assert ClusterConfig.model_validate({**COMPLETE, "peers": ["http://127.0.0.1:1"], "url": "http://localhost:2"})
