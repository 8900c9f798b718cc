"""`context.emit`: outputs to any topic, written only after the handler has succeeded."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.delivery.outcomes import ACK
from headrace.errors import DestinationUnavailable, TopicNotFound
from tests.function_workers import Run, Write
from yaml_table import table

HANDLER = table(__file__, "handler")
PLAIN = HANDLER.replace("PREFIX ", "").replace("PAUSE", "pass")
ASYNC = HANDLER.replace("PREFIX", "async").replace("PAUSE", "await asyncio.sleep(0)")


@pytest.mark.parametrize("code", [PLAIN, ASYNC])
@pytest.mark.parametrize("output", ["", "out"])
async def test_outputs_of_calls_that_succeeded_are_written_in_order(
    write_function: Write, running: Run, code: str, output: str
) -> None:
    """Emitted ones first, then what was returned; those of a failed call are dropped, with and without outputTopic.

    A handler that copies its headers gives no output the identity of another record.
    """
    own = [("headrace.redrive.of", b"t:0:5"), ("h", b"2")]
    attributes = {"ordering": "none", **({"outputTopic": output} if output else {})}
    async with running(write_function(code, **attributes)) as function:
        replies = await function.deliver(
            b"ok", b"raise", b"tombstone", b"refuse", b"copy", first=5, read_headers=lambda: own
        )
        assert [reply.error for reply in replies] == ["", "ValueError", "", "status 400", ""]
        found = [(each.topic, each.key, each.value, each.headers) for each in function.written]

        def of(offset: int) -> list[Any]:
            return [
                ("first", b"key", b'{"n":%d}' % offset, [("h", b"1")]),
                ("second", b"other", b"text", [("a", b"1"), ("a", None)]),
            ]

        returned = [(output, b"key", b"returned", None)] if output else []
        copied = [(output, b"key", b"returned", [("h", b"2")])] if output else []
        tombstone = [("second", b"key", None, None)]
        assert found == [*of(5), *returned, *of(7), *tombstone, *returned, *of(9), *copied]


async def test_a_wrong_emit_fails_its_record_in_words(write_function: Write, running: Run) -> None:
    """No topic, a name that no topic has, a value that cannot be encoded, and no call at work."""
    code = """

        def init_context(context):
            try:
                context.emit("t")
            except RuntimeError as problem:
                context.user_data.problem = str(problem)

        def handler(context, event):
            if event.body == b"outside":
                raise RuntimeError(context.user_data.problem)
            if event.body == b"none":
                context.emit("", value=b"v")
            if event.body == b"name":
                context.emit("a/b", value=b"v")
            if event.body == b"object":
                context.emit("t", value={})
    """
    async with running(write_function(code, outputFormat="binary", ordering="none")) as function:
        replies = await function.deliver(b"outside", b"none", b"name", b"object", b"fine")
        reasons = [reply.reason for reply in replies]
        assert "emit outside a call of the handler" in reasons[0]
        assert "no outputTopic" in reasons[1]
        assert "'a/b', which is not a valid topic name" in reasons[2]
        assert "outputFormat is binary" in reasons[3]
        assert replies[4] == ACK
        assert function.written == []


async def test_internal_topics_are_refused_and_missing_ones_are_the_destinations_failure(
    write_function: Write, running: Run
) -> None:
    """The first ends its record alone, the second uses up no attempt."""
    code = """
        def handler(context, event):
            context.emit(event.body.decode(), value=b"v")
            context.emit("b", value=b"w")
    """
    async with running(write_function(code)) as function:
        replies = await function.deliver(b"a", b"_headrace-audit", b"x.dlq")
        assert [(reply.error, reply.permanent) for reply in replies] == [
            ("", False),
            ("TopicInternal", True),
            ("TopicInternal", True),
        ]
        assert [each.topic for each in function.written] == ["a", "b"]

        async def refuse(records: Any) -> list[Any]:
            return [TopicNotFound("no topic nowhere") for _ in records]

        function.produce = refuse
        with pytest.raises(DestinationUnavailable, match="outputs to nowhere are not acknowledged: no topic"):
            await function.deliver(b"nowhere")
