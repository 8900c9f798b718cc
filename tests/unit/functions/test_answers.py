"""What handlers return, and how they are found."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from yaml_table import table

from headrace.functions.protocol import Output, Result
from headrace.functions.sdk import Response
from headrace.functions.worker.handler import Responses, Unusable, failure, is_async, load_handler


class Logged:
    def __log__(self) -> str:
        return "logged"


@pytest.mark.parametrize(
    ("response", "body"),
    [
        ("as is", b"as is"),
        (b"\x00as is", b"\x00as is"),
        ({"a": 1}, b'{"a":1}'),
        (
            {"a": float("nan"), "b": [float("inf"), -float("inf"), None]},
            b'{"a":"NaN","b":["Infinity","-Infinity",null]}',
        ),
        ({"a": Logged()}, b'{"a":"logged"}'),
        ((201, "text"), b"text"),
        ((201, {"a": 1}), b'{"a":1}'),
        (7, b"7"),
        (True, b"true"),
        (Response(body={"a": 1}), b'{"a":1}'),
        (Response(body=b"b"), b"b"),
    ],
)
def test_one_output_in_json(response: Any, body: bytes) -> None:
    """Nuclio's return rules: text and bytes as they are, everything else as JSON."""
    assert Responses("json").result_of(response) == body


def test_an_empty_body_is_an_output_too() -> None:
    """It must not be taken for no output."""
    assert Responses("json").result_of(b"") == Responses("json").result_of("") == Result([Output(b"", [])])
    assert Responses("json", used=False).result_of(b"body") is None


@pytest.mark.parametrize("response", [None, [], Response(), (200, None), [None]])
def test_none_is_no_output(response: Any) -> None:
    """Neither None nor an empty list writes a record, and neither fails."""
    assert Responses("json").result_of(response) is None


def test_a_list_is_several_replies() -> None:
    """Each item is one output; one failed item fails the record."""
    assert Responses("json").result_of([{"a": 1}, "b"]) == Result([Output(b'{"a":1}', []), Output(b"b", [])])
    assert Responses("json").result_of([{"a": 1}, (500, "no")]) == Result(error="status 500", reason="no")


def test_response_headers_become_record_headers() -> None:
    """Text and numbers as UTF-8, bytes and null as they are."""
    response = Response({"a": "ä", "b": b"\x00", "c": None, "d": 5}, "body")
    assert Responses("string").result_of(response) == Result(
        [Output(b"body", [("a", "ä".encode()), ("b", b"\x00"), ("c", None), ("d", b"5")])]
    )


@pytest.mark.parametrize("wanted", ["json", ""])
@pytest.mark.parametrize("response", [(400, "bad"), Response(body="bad", status_code=503)])
def test_a_status_of_400_or_more_is_a_failure(response: Any, wanted: str) -> None:
    """With or without an output topic."""
    result = Responses(wanted).result_of(response)
    assert result and result.error.startswith("status ") and result.reason == "bad" and not result.outputs


def test_without_an_output_topic_bodies_are_dropped() -> None:
    """A value that is not used is not encoded either."""
    assert Responses("json", used=False).result_of({"a": object()}) is None


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


def test_an_exception_that_cannot_describe_itself_is_a_failure_like_any_other() -> None:
    """Its class is the reason."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert failure(Odd()).reason == "Odd"


def test_async_is_seen_through_partials_and_callables() -> None:
    """A function of an unknown kind is served as plain."""

    class CallableObject:
        async def __call__(self, context: Any, event: Any) -> None: ...

    async def handler(context: Any, event: Any) -> None: ...

    assert is_async(handler) and is_async(functools.partial(handler, 1)) and is_async(CallableObject())
    assert not is_async(lambda context, event: None) and not is_async(print) and not is_async(None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_init_context_is_looked_up_where_the_handler_is_defined(folder: Path) -> None:
    """A handler that is re-exported brings its own module's init_context."""
    (folder / "pack").mkdir()
    (folder / "pack" / "inner_fn.py").write_text("def init_context(c): pass\ndef handler(c, e): pass\n")
    (folder / "outer_fn.py").write_text("from pack.inner_fn import handler\n")
    handler, init_context = load_handler("outer_fn:handler", str(folder))
    assert init_context and init_context.__module__ == handler.__module__ == "pack.inner_fn"


@pytest.mark.parametrize(("text", "expected"), table(__file__, "a_handler_that_cannot_be_loaded_says_why"))
def test_a_handler_that_cannot_be_loaded_says_why(folder: Path, text: str, expected: str) -> None:
    """Missing module, missing function, and code that fails have different texts."""
    (folder / "good_fn.py").write_text("def handler(c, e): pass\n")
    (folder / "needy_fn.py").write_text("import absent_library\n")
    (folder / "broken_fn.py").write_text("1 / 0\n")
    (folder / "exiting_fn.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(Unusable, match=f"(?s){expected}"):
        load_handler(text, str(folder))
