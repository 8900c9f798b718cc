"""Handlers that get lists of events, and handlers whose events have a type."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.consumers import RetryConfig
from headrace.delivery.outcomes import ACK, Outcome
from headrace.delivery.policy import judge
from tests.function_workers import Run, Write
from yaml_table import table


def batches(size: int, **trigger: Any) -> dict[str, Any]:
    """Return keys of a trigger that switch batches on."""
    return {"batch": {"mode": "enable", "batchSize": size, "timeout": "1s"}, **trigger}


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_call_gets_a_list_and_answers_for_each(write_function: Write, running: Run, prefix: str) -> None:
    """Up to batchSize events of a partition, in their order; replies by position, by event_id, or one for all."""
    code = f"""
        {prefix}def handler(context, events):
            sizes = context.user_data.__dict__.setdefault("sizes", [])
            sizes.append(len(events))
            how = events[0].body
            for event in events:
                context.emit("seen", value=str(sizes), event=event)
            if how == "ids":
                return [context.Response(body=event.body, event_id=event.id) for event in reversed(events)]
            if how == "one":
                return "all"
            if how == "refuse":
                return 400, "no"
            if how == "short":
                return ["x"]
            return [(400, "bad") if event.body == "bad" else event.body for event in events]
    """
    folder = write_function(code, trigger=batches(3), valueFormat="string", outputTopic="out", ordering="none")
    async with running(folder) as function:
        found = await function.deliver(b"a", b"bad", b"\xff", b"c", b"ids", b"y")
        assert [reply.error for reply in found] == ["", "status 400", "DecodeError", "", "", ""]
        assert [reply.shared for reply in found] == [False] * 6
        written = [(each.topic, each.value) for each in function.written]
        second = [("seen", b"[3, 2]"), ("out", b"ids"), ("seen", b"[3, 2]"), ("out", b"y")]
        assert written == [("seen", b"[3]"), ("out", b"a"), ("seen", b"[3]"), ("out", b"c"), *second]
        function.written.clear()
        assert await function.deliver(b"one", b"x") == [ACK, ACK]
        assert [each.value for each in function.written if each.topic == "out"] == [b"all"]
        for how in (b"refuse", b"short"):
            found = await function.deliver(how, b"x")
            assert [reply.shared for reply in found] == [True, True]
            assert all(reply.error for reply in found)
        assert "returned 1 replies for a batch of 2 events" in found[0].reason


async def test_a_batch_that_fails_as_a_whole_is_halved(write_function: Write, running: Run) -> None:
    """An exception blames no record among several; alone, a record is to blame as ever."""
    code = """
        def handler(context, events):
            if any(event.body == b"raise" for event in events):
                raise ValueError("one of them")
    """
    async with running(write_function(code, trigger=batches(10))) as function:
        found = await function.deliver(b"a", b"raise", b"c")
        assert [reply.shared for reply in found] == [True] * 3
        judged = judge([object()] * 3, found, RetryConfig(attempts=1))  # type: ignore[list-item]
        assert [*judged] == [Outcome.SPLIT], "no record becomes a dead letter for the failure of its batch"
        (alone,) = await function.deliver(b"raise")
        assert alone.error and not alone.shared
        assert await function.deliver(b"a") == [ACK]


async def test_an_emit_in_a_batch_names_its_event(write_function: Write, running: Run) -> None:
    """Else a failure of one event could drop the output of another."""
    code = "def handler(context, events):\n    context.emit('t', value=b'v')\n"
    async with running(write_function(code, trigger=batches(10))) as function:
        found = await function.deliver(b"a")
        assert "emit in a batch without its event: write event=" in found[0].reason


TYPED = table(__file__, "typed")
"""Types of bodies, by what makes them."""


@pytest.mark.parametrize("kind", TYPED)
@pytest.mark.parametrize("batch", [False, True])
async def test_a_typed_handler_gets_valid_bodies_only(
    write_function: Write, running: Run, kind: str, batch: bool
) -> None:
    """What does not fit is undecodable: no attempt can help it, and its neighbours are called."""
    one = "def handler(context, event: Event[Order]):\n    return 'none' if event.body is None else event.body.id\n"
    many = "def handler(context, events: list[Event[Order]]):\n    return [e.body and e.body.id for e in events]\n"
    code = f"from __future__ import annotations\nfrom nuclio_sdk import Event\n{TYPED[kind]}{many if batch else one}"
    trigger = batches(10) if batch else {}
    async with running(write_function(code, trigger=trigger, valueFormat="json", outputTopic="out")) as function:
        values = b'{"id": "a", "euros": 5}', b'{"id": "b", "euros": "secret"}', b"{", b'{"id": "c", "euros": 7}'
        found = await function.deliver(*values, None)
        assert [reply.error for reply in found] == ["", "DecodeError", "DecodeError", "", ""]
        assert [reply.permanent for reply in found] == [False, True, True, False, False]
        assert "euros" in found[1].reason and "secret" not in found[1].reason
        assert [each.value for each in function.written][:2] == [b"a", b"c"]
