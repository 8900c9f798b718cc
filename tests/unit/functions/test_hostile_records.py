"""One bad record decides about itself only: what a handler does with it changes nothing for its neighbours."""

from __future__ import annotations

import re

import pytest

from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.functions.held_outputs import HeldOutputs
from headrace.records import Record
from tests.function_workers import PARTITION, Run, Running, Write

CODE = """
    import asyncio, decimal, enum, json, sys
    import nuclio_sdk

    class Own(Exception):
        def __str__(self):
            raise SystemExit("no text")
        __notes__ = property(lambda self: 1 / 0)
    class Named(type):
        __name__ = property(lambda self: 1 / 0)
    class Odd(Exception, metaclass=Named): ...
    class Text(str): ...
    class Number(float): ...
    class Shown:
        def __str__(self): return "shown"
    class Hidden:
        __log__ = __repr__ = __str__ = property(lambda self: 1 / 0)
    def boom(error):
        raise error
    def deep(n=0):
        return deep(n + 1)
    def nested():
        value = []
        for _ in range(100_000):
            value = [value]
        return value
    def items():
        yield 1
    async def work():
        return b"done"
    def grouped():
        error = ValueError("inner")
        for _ in range(5000):
            error = ExceptionGroup("outer", [error])
        raise error
    def logs(context, event):
        context.logger.bind(odd=Hidden()).error("%d of %s", Hidden(), "x", other="\\ud83d", many=[Hidden()])
        context.logger.exception(Hidden())
        return repr(event).encode()
    def reads(event):
        if event.timestamp is None or event.timestamp.year < 9999:
            return json.dumps([str(event.headers), event.to_json(), repr(event), event.get_header("none")]).encode()
    def cancels():
        try:
            asyncio.current_task().cancel()
        except RuntimeError:
            raise asyncio.CancelledError from None
        return b"cancelled"

    CASES = {
        "exit": lambda c, e: sys.exit(3), "interrupt": lambda c, e: boom(KeyboardInterrupt()),
        "stop": lambda c, e: boom(StopIteration(1)), "cancelled": lambda c, e: boom(asyncio.CancelledError()),
        "memory": lambda c, e: boom(MemoryError()), "deep": lambda c, e: deep(), "mute": lambda c, e: boom(Own()),
        "odd_class": lambda c, e: boom(Odd()), "no_name": lambda c, e: boom(type("", (Exception,), {})()),
        "long_name": lambda c, e: boom(type("E" * 1000, (Exception,), {})("\\ud83d")),
        "huge": lambda c, e: boom(ValueError("x" * 2_000_000)), "lines": lambda c, e: boom(ValueError("\\n\\n")),
        "groups": lambda c, e: grouped(),
        "with_response": lambda c, e: boom(nuclio_sdk.ExceptionWithResponse(503, "b")),
        "generator": lambda c, e: items(), "work": lambda c, e: c.Response(body=work()),
        "exception": lambda c, e: ValueError("v"), "object": lambda c, e: Shown(), "hidden": lambda c, e: Hidden(),
        "module": lambda c, e: sys, "nested": lambda c, e: nested(), "half": lambda c, e: {"a": "\\ud83d"},
        "status": lambda c, e: c.Response(status_code="500"), "headers": lambda c, e: c.Response({"\\ud83d": 1}, "b"),
        "no_headers": lambda c, e: c.Response(7, "b"), "big": lambda c, e: 10**5000,
        "emit": lambda c, e: c.emit("a b", value=b"v", event=e),
        "emit_object": lambda c, e: c.emit("t", value=Hidden(), event=e),
        "text": lambda c, e: Text("text"), "number": lambda c, e: {"n": Number(1.5)},
        "array": lambda c, e: bytearray(b"array"), "decimal": lambda c, e: decimal.Decimal("1.50"),
        "nothing": lambda c, e: None, "logs": logs, "reads": lambda c, e: reads(e),
        "cancels": lambda c, e: cancels(), "good": lambda c, e: e.id.encode(),
    }
    """

HANDLERS = """
    {prefix}def one(context, event):
        {wait}
        return CASES[event.key.decode()](context, event)
    {prefix}def many(context, events):
        {wait}
        found = [CASES[event.key.decode()](context, event) for event in events]
        events.clear()
        return found
    """

FAILS = {
    **dict.fromkeys(("generator", "work", "exception", "object"), "TypeError"),
    **dict.fromkeys(("module", "no_headers", "status"), "TypeError"),
    **{"exit": "SystemExit", "interrupt": "KeyboardInterrupt", "stop": "StopIteration", "huge": "ValueError"},
    "cancelled": "CancelledError",
    **{"memory": "MemoryError", "deep": "RecursionError", "mute": "Own", "odd_class": "Odd", "no_name": "Exception"},
    **{"long_name": "E" * 200, "lines": "ValueError", "groups": "ExceptionGroup", "nested": "RecursionError"},
    **{"with_response": "ExceptionWithResponse", "half": "UnicodeEncodeError", "headers": "UnicodeEncodeError"},
    **{"hidden": "ZeroDivisionError", "big": "ValueError", "emit": "ValueError", "emit_object": "ZeroDivisionError"},
}
"""The class of the failure; what is not here succeeds. A coroutine that raises StopIteration raises RuntimeError."""
OUTPUTS = {"text": b"text", "number": b'{"n":1.5}', "array": b"array", "decimal": b'"1.50"'}
ODD = [(None, -1, None), (b"\xff\xed\xa0\x80", 2**62, [("", b"\xff"), ("\ufffd", None)]), (b"", 0, [("h", b"")] * 9)]
"""Values, timestamps and headers."""
NAMES = re.findall(r'"(\w+)": (?:lambda|logs)', CODE)[:-1]


async def settled(function: Running, names: list[str], first: int) -> list[Reply]:
    """Deliver records, and again alone those whose call has failed with several; return how each ended."""
    records = [
        Record("flights", 3, first + n, at, name.encode(), value, lambda headers=headers: headers)  # type: ignore[misc]
        for n, name in enumerate(names)
        for value, at, headers in [ODD[(first + n) % len(ODD)]]
    ]
    deliveries = [Delivery("g", PARTITION, 1, part, 1) for part in (records, *([each] for each in records))]
    together, *alone = [lambda one=one: function.destination.deliver(one) for one in deliveries]
    replies = await together()
    return [(await again())[0] if reply.shared else reply for reply, again in zip(replies, alone, strict=True)]


@pytest.mark.filterwarnings("ignore:coroutine 'work' was never awaited")
@pytest.mark.parametrize("exactly_once", [False, True])
@pytest.mark.parametrize("form", ["one", "many"])
@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_record_ends_alone_as_it_ends_among_others(
    write_function: Write, running: Run, prefix: str, form: str, exactly_once: bool
) -> None:
    """Odd exceptions, return values, names, bytes and times, in plain and async calls of one and of many events."""
    code = CODE + HANDLERS.format(prefix=prefix, wait="await asyncio.sleep(0)" if prefix else "")
    trigger = {"batch": {"mode": "enable", "batchSize": 3, "timeout": "1s"}} if form == "many" else {}
    spec, own = {"handler": f"main:{form}"}, {"outputTopic": "out", "ordering": "none"}
    async with running(write_function(code, spec=spec, trigger=trigger, **own)) as function:
        held = HeldOutputs()
        if exactly_once:
            function.destination._held = function.destination._outputs._held = held
        for number, name in enumerate(NAMES):
            at = number * 10
            [alone] = await settled(function, [name], at)
            first, among, last = await settled(function, ["good", name, "good"], at + 2)
            assert (first, last) == (ACK, ACK), name
            assert (alone.error, alone.reason) == (among.error, among.reason), name
            expected = FAILS.get(name, "CancelledError" if name == "cancels" and not prefix else "")
            assert alone.error == ("RuntimeError" if prefix and name == "stop" else expected), (name, alone)
            found = function.written + [each for run in held._pending.get(PARTITION, ()) for each in run.records]
            ids = [f"flights-3-{at + 2}".encode(), f"flights-3-{at + 4}".encode()]
            assert [each.value for each in found if each.key == b"good"][-2:] == ids, name
            values = [each.value for each in found if each.key == name.encode()]
            assert not values or values[-1] == OUTPUTS.get(name, values[-1]), name
            assert bool(values) is (alone == ACK and name != "nothing"), name
        assert function.service.restarts == 0
