"""`headrace reactive register`: what a file must hold, and what of it is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.api import Api
from headrace.http.endpoint import Endpoint
from tests.command_line import headrace

TEAM = """\
reactive_consumers:
  shop-orders:
    topics: [orders]
    group: shop
    backend: {url: "http://localhost:1/", headers: {X-Key: "${env:SHOP_KEY}", X-File: "${file:key}"}}
"""


def test_references_are_replaced_on_the_teams_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server refuses them; so what it gets is what they stand for here."""
    (tmp_path / "team.yaml").write_text(TEAM)
    (tmp_path / "key").write_text("of-a-file\n")
    monkeypatch.setenv("SHOP_KEY", "of-the-environment")
    sent: dict[str, Any] = {}

    def call(api: Api, endpoint: Endpoint, body: Any, *, name: str) -> dict[str, Any]:
        sent[endpoint.url(name=name)] = body
        return {"name": "shop-orders", "owner": "shop", "version": 7, "state": "running"}

    monkeypatch.setattr(Api, "call", call)
    assert headrace("reactive", "register", str(tmp_path / "team.yaml"), "--url", "http://localhost:1") == 0
    headers = sent["/reactive-consumers/shop-orders"]["backend"]["headers"]
    assert headers == {"X-Key": "of-the-environment", "X-File": "of-a-file"}
    assert "running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "has no reactive_consumers"),
        ("reactive_consumers: {x: {topics: [a], topics: [b]}}", "written twice"),
        (TEAM, "SHOP_KEY, which is not set"),
    ],
)
def test_a_file_that_is_none_is_explained(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 78, and nothing is sent."""
    monkeypatch.delenv("SHOP_KEY", raising=False)
    monkeypatch.setattr(Api, "call", lambda *_: pytest.fail("it was sent"))
    (tmp_path / "team.yaml").write_text(text)
    assert headrace("reactive", "register", str(tmp_path / "team.yaml"), "--url", "http://localhost:1") == 78
    assert said in capsys.readouterr().err
