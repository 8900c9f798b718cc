"""What handlers return and raise."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.functions.protocol import Output, Result
from headrace.functions.sdk import Response
from headrace.functions.worker.handler import Responses, failure


class Logged:
    def __log__(self) -> str:
        return "logged"


@pytest.mark.parametrize(
    ("response", "result"),
    [
        ("as is", b"as is"),
        ("", Result([Output(b"", [])])),
        ({"a": 1}, b'{"a":1}'),
        (
            {"a": float("nan"), "b": [float("inf"), -float("inf"), None]},
            b'{"a":"NaN","b":["Infinity","-Infinity",null]}',
        ),
        ({"a": Logged()}, b'{"a":"logged"}'),
        ((201, "text"), b"text"),
        (7, b"7"),
        ([{"a": 1}, "b"], Result([Output(b'{"a":1}', []), Output(b"b", [])])),
        ([{"a": 1}, (500, "no")], Result(error="status 500", reason="no")),
        (Response(body="bad", status_code=503), Result(error="status 503", reason="bad")),
        (
            Response({"a": "ä", "b": b"\x00", "c": None, "d": 5}, "body"),
            Result([Output(b"body", [("a", "ä".encode()), ("b", b"\x00"), ("c", None), ("d", b"5")])]),
        ),
    ],
)
def test_what_a_handler_returns_becomes_outputs(response: Any, result: Any) -> None:
    """Text and bytes as they are, also empty ones; all else as JSON; a list is several, of which each may fail all."""
    assert Responses("json").result_of(response) == result


@pytest.mark.parametrize("response", [None, [], Response(), (200, None), [None]])
def test_none_writes_no_output(response: Any) -> None:
    """Neither None nor an empty list writes a record, and neither fails."""
    assert Responses("json").result_of(response) is None


def test_without_an_output_topic_bodies_are_dropped() -> None:
    """A value that is not used is not encoded either; a status of 400 or more is a failure still."""
    assert Responses("json", used=False).result_of({"a": object()}) is None
    assert Responses("", used=False).result_of((400, "bad")) == Result(error="status 400", reason="bad")


def test_formats_hold_what_they_can() -> None:
    """`string` takes everything, `binary` only bytes and text."""
    assert Responses("string").result_of(1.5) == b"1.5"
    assert Responses("string").result_of({"a": 1}) == b'{"a":1}'
    assert Responses("binary").result_of(b"b") == b"b"
    with pytest.raises(TypeError, match="handler returned dict"):
        Responses("binary").result_of({})


def test_a_failure_keeps_the_stack_of_the_users_code() -> None:
    """Class as the error, class and first line of the text as the reason; a long stack is cut at its beginning."""

    def failed(error: Exception) -> Result:
        def handler() -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            handler()
        return failure(caught.value)

    assert (result := failed(ValueError("boom\n at line 3"))).error == "ValueError"
    assert result.reason == "ValueError: boom"
    assert result.stack.startswith("Traceback (most recent call last):") and "in handler\n" in result.stack
    assert result.stack.endswith("ValueError: boom\n at line 3")
    assert failed(KeyError()).reason == "KeyError"
    assert failed(ValueError("\udcff")).reason == "ValueError: ?"
    long = failed(ValueError("\u20ac" * 9000))
    assert len(long.reason) == 4000 and 8000 < len(long.stack.encode()) <= 8192
