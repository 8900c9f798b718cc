"""The section `cluster`: what several processes need to forward requests to each other."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config.cluster import ClusterConfig

SECRET = "x" * 32
COMPLETE = {"url": "https://one:8082/", "peers": ["https://one:8082", "https://two:8082/"], "secret": SECRET}


def test_a_complete_section() -> None:
    assert ClusterConfig().peers == []
    complete = ClusterConfig.model_validate(COMPLETE)
    assert (complete.url, complete.peers) == ("https://one:8082", ["https://one:8082", "https://two:8082"])
    assert SECRET not in repr(complete)
    assert ClusterConfig.model_validate({**COMPLETE, "peers": ["http://127.0.0.1:1"], "url": "http://localhost:2"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"url": None}, "set the URL at which they reach this process"),
        ({"secret": ""}, "secret has fewer than 32 characters"),
        ({"secret": "x" * 31}, "secret has fewer than 32 characters"),
        ({"peers": ["http://two:8082"]}, "is not https"),
        ({"url": "http://one:8082"}, "is not https"),
        ({"peers": ["https://two:8082/headrace"]}, "has a path or query"),
        ({"peers": ["https://two:8082?a=1"]}, "has a path or query"),
        ({"peers": ["two:8082"]}, "should be a URL"),
        ({"max_forwarded": 0}, "greater than or equal to 1"),
    ],
)
def test_what_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        ClusterConfig.model_validate({**COMPLETE, **change})
