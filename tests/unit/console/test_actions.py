"""What the dialog of an action says of previews and responses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec

from headrace.admin.cluster.topic_administration import TopicChange, TopicChanges
from headrace_console.actions import dry_run, preview_text, run_action
from headrace_console.pages.topics_page import changes_text, create_action
from headrace_console.server_api import ApiReply


def view_of(body: Any) -> Any:
    """A page of a server that responds with this body."""
    return SimpleNamespace(send=AsyncMock(return_value=ApiReply(body, 200, "c-1")))


async def test_a_created_topic_and_its_preview_are_shown() -> None:
    """The body is what the API makes of its own type."""
    changes = [TopicChange("partitions", None, 2), TopicChange("config retention.ms", "5", None)]
    view = view_of(msgspec.to_builtins(TopicChanges("t", True, changes)))
    shown = "partitions: - -> 2\nconfig retention.ms: 5 -> default"
    assert await preview_text(create_action(view), dict) == shown
    text, correlation_id = await run_action(view, create_action(view), {})
    assert (text.partition("\n")[2], correlation_id) == (shown, "c-1")


async def test_a_response_that_cannot_be_shown_does_not_leave_a_dialog_silent() -> None:
    """As of a server of another version: it says so, and that the request was done."""
    view = view_of({"changes": [{"what": "partitions"}]})
    action = create_action(view)._replace(preview=dry_run(view, "POST", "/topics", changes_text))
    assert (await preview_text(action, dict)).startswith("this console does not understand the response")
    text, correlation_id = await run_action(view, action, {})
    assert text.startswith("Audit: ") and "does not understand the response" in text
    assert correlation_id == "c-1"
