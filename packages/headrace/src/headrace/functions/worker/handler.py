"""The user's handler inside the worker: how it is found, and the results of its responses (Nuclio's return rules)."""

import contextlib
import importlib.util
import inspect
import math
import re
import shlex
import sys
import typing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import msgspec

from headrace.functions import sdk
from headrace.functions.protocol import LOG_MARK, AnyResult, Headers, Output, Result, Setup

_CO_COROUTINE = 0x80
_REASON_CHARACTERS = 4000
_NAME_CHARACTERS = 200
_STACK_BYTES = 8192
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")

_DATA = frozenset((bytes, str, dict, list, tuple, int, float, bool, type(None)))
_PLAIN: Any = ((str, str.__str__), (int, int.__int__), (float, float.__float__))
"""Classes whose subclasses the encoder does not take, as those of numpy."""
_BUFFERS = (bytearray, memoryview)
_PENDING = (GeneratorType, AsyncGeneratorType, CoroutineType)

Handler = Callable[[Any, Any], Any]


class Unusable(Exception):
    """The handler cannot be loaded or set up; the text says what to do."""


def load_handler(text: str, folder: str) -> tuple[Handler, Callable[[Any], Any] | None]:
    """Return the handler function and the `init_context` of the module that defines it, None if it has none.

    Raises:
        Unusable: The function does not exist, or importing its module failed.
    """
    module_name, function_name = text.split(":")
    sys.path.insert(0, folder)
    for name in ("nuclio_sdk", "nuclio"):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # not installed; a folder of this name does not count
            sys.modules[name] = sdk
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as cause:
        if cause.name and (module_name == cause.name or module_name.startswith(cause.name + ".")):
            raise Unusable(f"module {module_name} of handler {text} is not in {folder}: check spec.handler") from cause
        raise Unusable(f"importing {module_name} failed: {how_to_install(folder)}\n{trace_of(cause)}") from cause
    except BaseException as cause:  # boundary to user code: readiness and log show the trace
        raise Unusable(f"importing {module_name} failed: {trace_of(cause)}") from cause
    if (package := sys.modules.get("nuclio_sdk", sdk)) is not sdk:  # so that `isinstance` holds there
        sdk.Event.__bases__ = (getattr(package, "Event", sdk.Replaceable),)
        sdk.Response.__bases__ = (getattr(package, "Response", sdk.Replaceable),)
    handler = getattr(module, function_name, None)
    if not callable(handler):
        raise Unusable(f"module {module_name} has no function {function_name}: check spec.handler")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise Unusable(f"handler {text} is a generator, which a call does not run: return a list instead of yield")
    with contextlib.suppress(ValueError):  # its signature is not known
        try:
            inspect.signature(handler).bind(None, None)
        except TypeError as cause:
            form = f"write def {function_name}(context, event)"
            raise Unusable(f"handler {text} cannot be called with a context and an event: {cause}; {form}") from None
    home = sys.modules.get(getattr(handler, "__module__", None) or "", module)
    return handler, getattr(home, "init_context", None)


def context_of(setup: Setup, sink: sdk.Sink) -> sdk.Context:
    """Return the context of a worker; log lines of its handler have the id of the event at work."""

    def write(level: str, message: str, fields: dict[str, Any]) -> None:
        event = context._at_work()
        sink(level, message, {**fields, "event_id": _text(event.id)} if event else fields)

    logger = sdk.Logger(setup.log_level, sink=write).bind(worker_id=setup.worker_id)
    trigger = sdk.TriggerInfo(setup.triggers[0].kind, setup.triggers[0].name)
    context = sdk.Context(logger, sdk.Platform(namespace=setup.namespace), setup.worker_id, trigger)
    return context


def how_to_install(folder: str) -> str:
    """Return the command that installs libraries for the function in a folder: its workers look there first."""
    file = Path(folder) / "requirements.txt"
    what = f"-r {shlex.quote(str(file))}" if file.is_file() else "NAME"
    return f"to install libraries, run {sys.executable} -m pip install --target {shlex.quote(folder)} {what}"


def is_async(function: Any) -> bool:
    """Whether calling it returns a coroutine, as far as that is known without calling it."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return bool(getattr(code, "co_flags", 0) & _CO_COROUTINE)


def body_type(handler: Handler) -> Any:
    """Return `T` if the handler's event is annotated `Event[T]`, or `list[Event[T]]` for batches; else None."""
    try:
        hint = typing.get_type_hints(handler).get([*inspect.signature(handler).parameters][1])
    except Exception:  # noqa: BLE001 boundary to user code: names that only type checkers import
        return None
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
    return typing.get_args(hint)[0] if typing.get_origin(hint) is sdk.Event else None


def trace_of(error: BaseException) -> str:
    """Return an error with the stack of the user's code; a long stack loses its beginning."""
    import traceback

    stack = error.__traceback__.tb_next if error.__traceback__ else None
    try:
        trace = "".join(traceback.format_exception(type(error), error, stack)).strip()
    except BaseException:  # noqa: BLE001 boundary to user code: parts of an exception may be its own
        trace = "".join(["Traceback (most recent call last):\n", *traceback.format_tb(stack)]).strip()
    return trace.encode(errors="replace")[-_STACK_BYTES:].decode(errors="ignore")


def failure(error: BaseException) -> Result:
    """Return the result of a record whose handler raised."""
    name, text = vars(type)["__name__"].__get__(type(error)), ""  # its class may have a property of this name
    name = name[:_NAME_CHARACTERS] or "Exception"
    with contextlib.suppress(BaseException):  # boundary to user code: an exception may fail to describe itself
        text = str(error).strip()
    reason = f"{name}: {text}".removesuffix(": ").splitlines()[0].encode(errors="replace")
    return Result(error=name, reason=reason.decode()[:_REASON_CHARACTERS], stack=trace_of(error))


class Responses:
    """Turns what a handler returns into a result."""

    nothing: object = None
    """The return value that needs no result."""

    def __init__(self, output_format: str, used: bool = True) -> None:
        """Encode outputs in a format (`json`, `string`, `binary`); without `used`, return values are not outputs."""
        self._format = output_format
        self._used = used

    def result_of(self, response: Any) -> AnyResult:
        """Return the result of a record, None for success without output.

        A list is several replies, and each item is one output. None is not an output.

        Raises:
            TypeError: The output format cannot hold the returned value.
        """
        if type(response) is bytes and response and self._used:
            return response
        outputs: list[Output] = []
        held = False
        for reply in response if type(response) is list else (response,):
            status, body, headers = parts_of(reply)
            if status >= 400:
                return Result(error=f"status {status}", reason=_text(body)[:_REASON_CHARACTERS])
            if type(body) not in _DATA:
                check_is_data(body)
            if body is not None and self._used:
                outputs.append(Output(self.encode(body), headers))
            held = held or (hasattr(reply, "status_code") and sdk.has_no_ack(reply.headers))
        if len(outputs) == 1 and outputs[0].body and not (outputs[0].headers or held):
            return outputs[0].body
        return Result(outputs, held=held) if outputs or held else None

    def results_of(self, response: Any, events: Sequence[sdk.Event]) -> list[AnyResult]:
        """Return the results of a batch: a list has one reply per event, everything else is one reply for all.

        Raises:
            TypeError: The list has another length, or the output format cannot hold a returned value.
        """
        if type(response) is not list:
            result = self.result_of(response)
            whole = result if isinstance(result, Result) else Result()
            if whole.error:
                return [msgspec.structs.replace(whole, shared=len(events) > 1)] * len(events)
            others = Result(held=True) if whole.held else None
            return [*[others] * (len(events) - 1), result]
        replies = {getattr(reply, "event_id", None): reply for reply in response}
        if any(replies):
            response = [replies[event.id] for event in events if event.id in replies]
        if len(response) != len(events):
            count = f"{len(response)} replies for a batch of {len(events)} events"
            raise TypeError(f"the handler returned {count}: return one reply per event, or a value that is not a list")
        return [*map(self._own_result, response)]

    def _own_result(self, reply: Any) -> AnyResult:
        try:
            return self.result_of(reply)
        except Exception as cause:  # noqa: BLE001 boundary to user code: this reply fails its own event
            return failure(cause)

    def emitted(self, topic: str, key: Any, value: Any, headers: Any) -> Output:
        """Return the output of a call of `context.emit`.

        Raises:
            ValueError: No topic can have this name.
            TypeError: The output format cannot hold the value or key.
        """
        valid = _TOPIC.fullmatch(topic or "")
        if topic and not valid:
            raise ValueError(f"emit to {topic!r}, which is not a valid topic name: use letters, digits and . _ - only")
        if not (topic or self._used):
            raise ValueError("emit without a topic, and the trigger has no outputTopic: give one of them")
        return Output(self.encode(value), headers_of(headers or ()), valid[0] if valid else "", self.encode(key))

    def encode(self, body: Any) -> bytes | None:
        """Return the bytes of a value; TypeError if the output format cannot hold it."""
        if body is None:
            return None
        if isinstance(body, bytes):
            return bytes(body)  # the same object, unless it is of a subclass, which cannot be sent
        if isinstance(body, str):
            return body.encode()
        if isinstance(body, _BUFFERS):
            return bytes(body)
        if self._format == "binary":
            kind = type(body).__name__
            raise TypeError(f"outputFormat is binary and the handler returned {kind}: return bytes, or set json")
        if self._format == "string" and not isinstance(body, dict | list | tuple):
            return text_of(body).encode()
        return to_json(body)


def check_is_data(body: Any) -> None:
    """Raise TypeError for what a handler returns by mistake: work that was not run, and an exception."""
    kind = type(body).__name__
    if isinstance(body, _PENDING) or hasattr(type(body), "__await__"):
        raise TypeError(f"the handler returned a {kind}, which was not run: return its result, or a list of its items")
    if isinstance(body, BaseException):
        raise TypeError(f"the handler returned the exception {kind}: raise it")


def text_of(body: Any) -> str:
    """Return a value as text; TypeError for an object whose text says only what it is, such as `<Order at 0x7f..>`."""
    text = str(body)
    if type(body) not in _DATA and not isinstance(body, str) and text[:1] == "<" and text[-1:] == ">":
        raise TypeError(f"the handler returned {type(body).__name__}, which has no text: return text, bytes or a dict")
    return text


def parts_of(reply: Any) -> tuple[int, Any, Headers]:
    """Return status, body and headers of what a handler returned."""
    if hasattr(reply, "status_code"):  # a Response of this SDK or of the package nuclio_sdk
        return reply.status_code, reply.body, headers_of(reply.headers)
    if type(reply) is tuple and len(reply) == 2 and type(reply[0]) is int:
        return reply[0], reply[1], []
    return 200, reply, []


def headers_of(headers: Any) -> Headers:
    """Return the headers of an output, from a mapping or from pairs; text and numbers become UTF-8.

    Raises:
        ValueError: A name or value has no UTF-8 form, as half an emoji.
    """
    pairs = headers.items() if hasattr(headers, "items") else headers
    return [(name, _header(value)) for each, value in pairs if (name := _name(each)).lower() != sdk.NO_ACK]


def _name(name: Any) -> str:
    """Return the name of a header; UnicodeEncodeError if Kafka cannot hold it."""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name).encode().decode()


def _header(value: Any) -> bytes | None:
    if value is None:
        return None
    return bytes(value) if isinstance(value, bytes) else str(value).encode()


def _text(body: Any) -> str:
    data = body if isinstance(body, bytes) else str(body).encode(errors="replace")
    return data.decode(errors="replace")


def to_json(value: Any) -> bytes:
    """Return JSON in which NaN and infinities are the strings "NaN", "Infinity", "-Infinity".

    Raises:
        TypeError: JSON has no form of the value. An object in it may be a text: what its `__log__` or `repr` returns.
    """
    encode = _encode if type(value) in _DATA else msgspec.json.Encoder(enc_hook=partial(_part, whole=value)).encode
    text = encode(value)
    # The encoder writes null for them, so only a text with null needs the second pass.
    return encode(_name_non_numbers(value)) if b"null" in text else text


def describe(value: Any) -> Any:
    """Return the JSON form of an object in a log line: what its `__log__` returns, else its `repr`."""
    try:
        return _form(value)
    except Exception:  # noqa: BLE001 boundary to user code: a log line must not fail the record it speaks of
        return f"an object of {type(value).__name__} that cannot be shown"


def log_line(level: str, message: str, fields: dict[str, Any]) -> bytes:
    """Return a log record for the parent as a line of standard error; it must not fail the record it speaks of."""
    try:
        line = msgspec.json.encode((level, message, fields), enc_hook=describe)
    except Exception:  # noqa: BLE001 boundary to user code
        line = msgspec.json.encode((level, ascii(message), {"fields": ascii(list(fields))}))
    return LOG_MARK + line + b"\n"


def _form(value: Any) -> Any:
    if hasattr(value, "__log__"):
        return value.__log__()
    plain = next((convert for kind, convert in _PLAIN if isinstance(value, kind)), repr)
    return plain(value)


def _part(value: Any, whole: object = None) -> Any:
    form = _form(value)
    is_name = isinstance(form, str) and not isinstance(value, str) and form[:1] == "<" and form[-1:] == ">"
    if is_name or (value is whole and not hasattr(value, "__log__") and not isinstance(value, str | int | float)):
        kind = type(value).__name__
        raise TypeError(f"the handler returned {kind}, which JSON cannot hold: return a dict, list, text or number")
    return form


_encode = msgspec.json.Encoder(enc_hook=_part).encode


def _name_non_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _name_non_numbers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_name_non_numbers(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
