"""The interface of handlers: `context`, `event`, `Response`, the logger, as in Nuclio's Python runtime.

A handler is `handler(context, event)`, plain or async, with an optional `init_context(context)` in the same module.
Inside a worker this module is also importable as `nuclio_sdk`, so files written for Nuclio run as they are. It has what
nuclio-sdk 0.6.3 has for handlers; docs/function-reference.md names the rest, which is of Nuclio's own runtime. Beyond
Nuclio an event has `key`, `timestamp_ms`, the true `num_shards`, and an `id` that names the record:
`topic-partition-offset`.
"""

import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property, partialmethod
from types import GenericAlias, SimpleNamespace
from typing import Any, NamedTuple

Callback = Callable[[], Any]
Sink = Callable[[str, str, dict[str, Any]], None]
"""Takes level, message and fields of one log line."""

_EPOCH = datetime(1970, 1, 1)  # naive on purpose: Nuclio's timestamps are UTC without a zone
NO_ACK = "x-nuclio-stream-no-ack"
"""Header of a response whose record is not acknowledged with its call; its name is read in any letter case."""
_SOURCE = {"topic": "topic", "shard_id": "partition", "num_shards": "partitions", "trigger": "trigger"}
"""Arguments of Nuclio's events, and the property of all events of a frame that each is."""
_FIELDS = {name: name for name in ("content_type", "method", "url", "type_version", "version", "last_in_batch")}
_FIELDS |= {"timestamp": "timestamp", "_type": "type", "path": "path", "size": "size", "fields": "fields", "_id": "id"}
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""With the numbers of Python's logging, which Nuclio's loggers are made with."""


class TriggerInfo(NamedTuple):
    """The trigger of an event: its `kind`, and its `name` in function.yaml."""

    kind: str = "kafka-cluster"
    name: str = ""


class EventSource(NamedTuple):
    """The properties that all events of one frame share."""

    topic: str = ""
    partition: int = 0
    partitions: int = 0
    trigger: TriggerInfo = TriggerInfo()


class Replaceable:
    """Base of classes that the package `nuclio_sdk` has too: its class of the same name, where that is installed."""


class Event(Replaceable):
    """One Kafka record, or one request of an HTTP trigger. A handler may set each attribute.

    Attributes:
        body: The value: bytes, or what the trigger's `valueFormat` makes of them; None for a tombstone.
        key: The key: bytes, or what `keyFormat` makes of them; None when the record has none.
        offset: The record's own offset.
        timestamp_ms: Milliseconds since the epoch, -1 when the record has none.
    """

    content_type = ""
    method = ""
    url = ""
    type = ""
    type_version = ""
    version = ""
    last_in_batch = False
    __class_getitem__: Any = classmethod(GenericAlias)
    """`Event[Order]`: a handler with this annotation gets events whose body is an `Order`."""

    def __init__(
        self,
        body: Any = None,
        key: Any = None,
        headers: Sequence[tuple[str, bytes | None]] | dict[str, bytes | None] | None = None,
        offset: int = 0,
        timestamp_ms: int = -1,
        origin: EventSource = EventSource(),  # noqa: B008 immutable
        **nuclio: Any,
    ) -> None:
        """Make an event, for a test or a call: `Event(b"value", headers={"a": b"b"})`; Nuclio's arguments work too."""
        self.body = body
        self.key = key
        self.offset = offset
        self.timestamp_ms = timestamp_ms
        self._headers = headers
        given = {name: value for name, value in nuclio.items() if value is not None}
        self._origin = origin._replace(**{_SOURCE[name]: given.pop(name) for name in _SOURCE if name in given})
        if unknown := nuclio.keys() - _SOURCE.keys() - _FIELDS.keys():
            raise TypeError(f"an event has no {min(unknown)}: known here are {', '.join([*_SOURCE, *_FIELDS])}")
        for name, value in given.items():
            setattr(self, _FIELDS[name], value)

    def to_json(self) -> str:
        """Return the event as JSON, as in Nuclio: a body of bytes is base64, other bytes are text."""
        import base64
        import json

        fields = {name: object.__getattribute__(self, name) for name in (*_NAMES, "body", "trigger")}
        if isinstance(self.body, bytes):
            fields["body"] = base64.b64encode(self.body).decode()
        fields["trigger"] = {"kind": fields["trigger"].kind, "name": fields["trigger"].name}
        for name in ("headers", "fields"):
            fields[name] = {_text(key): value for key, value in fields[name].items()}
        return json.dumps(fields, default=_text)

    def __repr__(self) -> str:
        try:
            return self.to_json()
        except Exception:  # noqa: BLE001 boundary to user code: JSON has no form of the body
            return object.__repr__(self)

    @cached_property
    def headers(self) -> dict[str, bytes | None]:
        """Headers by name; of a name that repeats, the last value."""
        return self._headers if isinstance(self._headers, dict) else dict(self._headers or ())

    def get_header(self, name: str) -> bytes | None:
        """Return the last header of this name in any letter case, None if there is none."""
        lower = name.lower()
        found = None
        for known, value in self.headers.items():
            if known.lower() == lower:
                found = value
        return found

    @cached_property
    def topic(self) -> str:
        """Topic of the record."""
        return self._origin.topic

    @cached_property
    def path(self) -> str:
        """The topic, `/` when there is none."""
        return self._origin.topic or "/"

    @cached_property
    def shard_id(self) -> int:
        """Partition of the record."""
        return self._origin.partition

    @cached_property
    def num_shards(self) -> int:
        """Partitions of the topic."""
        return self._origin.partitions

    @cached_property
    def trigger(self) -> TriggerInfo:
        """The trigger of the event."""
        return self._origin.trigger

    @cached_property
    def id(self) -> str:
        """`topic-partition-offset`: the same at every delivery of this record; `X-Correlation-Id` of a request."""
        return f"{self._origin.topic}-{self._origin.partition}-{self.offset}"

    @cached_property
    def timestamp(self) -> datetime | None:
        """UTC without a zone, in whole seconds as in Nuclio; None without one, and after the year 9999."""
        with contextlib.suppress(OverflowError):
            return None if self.timestamp_ms < 0 else _EPOCH + timedelta(seconds=self.timestamp_ms // 1000)
        return None

    @cached_property
    def size(self) -> int:
        """Bytes of the value; 0 for a tombstone."""
        return len(self.body) if hasattr(self.body, "__len__") else 0

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The query of a request; empty for Kafka."""
        return {}


_NAMES = (*(set(_SOURCE) - {"trigger"}), *_FIELDS.values(), "headers", "offset")


def _text(value: object) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


class Response(Replaceable):
    """A handler's response with status and headers.

    With an `outputTopic`, `body` becomes the value and `headers` the headers of a record, unless the body is None. A
    `status_code` of 400 or more is a failed attempt.
    """

    def __init__(
        self,
        headers: dict[str, Any] | None = None,
        body: Any = None,
        content_type: str | None = None,
        status_code: int = 200,
        event_id: str | None = None,
    ) -> None:
        """Make a response; its content type is `text/plain` by default."""
        self.headers = headers if headers is not None else {}
        self.body = body
        self.status_code = status_code
        self.content_type = content_type or "text/plain"
        self.event_id = event_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def ensure_no_ack(self) -> None:
        """Leave the record open until it is acknowledged explicitly."""
        self.headers[NO_ACK] = True


def has_no_ack(headers: Mapping[str, Any]) -> bool:
    """Return whether a response has the header of `ensure_no_ack`, in any letter case: `True` or `"true"`."""
    return any(name.lower() == NO_ACK and str(value).lower() == "true" for name, value in headers.items())


class QualifiedOffset(NamedTuple):
    """The offset of a record with its topic and partition; it can be stored, compared and sorted."""

    topic: str
    partition: int
    offset: int

    @classmethod
    def from_event(cls, event: Any) -> "QualifiedOffset":
        """Return the offset of an event."""
        return cls(event.topic or event.path, event.shard_id, event.offset)


class ExceptionWithResponse(OSError):
    """An exception with the parts of a response, as in Nuclio; raising it is a failure like any other."""

    def __init__(self, status_code: int, body: Any = None, content_type: str | None = None) -> None:
        super().__init__(f"status {status_code}")
        self.status_code = status_code
        self.body = body
        self.content_type = content_type


class Logger:
    """Structured log lines: `logger.info("took %d", n)`, `logger.info_with("took long", seconds=n)`."""

    def __init__(self, level: str | int = "debug", name: str = "nuclio_sdk", sink: Sink | None = None) -> None:
        """Write lines from a level on to a sink; without one, to standard error. The name is Nuclio's, and unused."""
        self.name = name
        self._sink = sink or print_line
        self._fields: dict[str, Any] = {}
        self._least = level if isinstance(level, int) else _LEVELS[level]

    def bind(self, **fields: Any) -> "Logger":
        """Add these fields to every further line of this logger, which is returned; they win over those of a call."""
        self._fields.update(fields)
        return self

    def exception(self, message: object, /, *args: Any, **fields: Any) -> None:
        """Write an error with the stack of the exception that is being handled."""
        import traceback

        self._write("error", message, *args, **{"exception": traceback.format_exc(), **fields})

    def _write(self, level: str, message: object, /, *args: Any, **fields: Any) -> None:
        if _LEVELS[level] < self._least:
            return
        text = ""  # a log line must not fail the record it speaks of
        with contextlib.suppress(Exception):
            text = str(message)
            try:
                text = text % args if args else text
            except (TypeError, ValueError):
                text = f"{text} {args}"
        self._sink(level, text, {**self._fields, **fields, **self._fields})

    debug = debug_with = partialmethod(_write, "debug")
    info = info_with = partialmethod(_write, "info")
    warn = warning = warn_with = warning_with = partialmethod(_write, "warning")
    error = error_with = critical = partialmethod(_write, "error")


class NotAcknowledged(Exception):
    """A record cannot be acknowledged; the text says why."""


class Platform:
    """The platform, and the callbacks of the function."""

    def __init__(
        self, kind: str = "local", namespace: str = "default", connection_provider: Callable[..., Any] | None = None
    ) -> None:
        """Make a platform; handlers' own tests may give a provider of connections for `call_function`."""
        self.kind = kind
        self.namespace = namespace
        self._connection_provider = connection_provider
        self.on_drain: Callback | None = None
        self.on_termination: Callback | None = None

        self.acknowledged: list[Any] = []
        """Without a worker, as in handlers' own tests: what was acknowledged explicitly."""
        self._acknowledge: Callable[[str, int, int], Awaitable[str]] | None = None

    async def explicit_ack(self, qualified_offset: Any) -> None:
        """Acknowledge a record explicitly, and unless workers are by key those before it; return when that is taken.

        A plain handler writes `asyncio.run(context.platform.explicit_ack(qualified_offset))`.

        Args:
            qualified_offset: Any earlier event of the function, or its topic, partition and offset.

        Raises:
            NotAcknowledged: Its partition is not assigned here any more, or the record was not delivered yet.
        """
        if not hasattr(qualified_offset, "partition"):
            qualified_offset = QualifiedOffset.from_event(qualified_offset)
        if self._acknowledge is None:
            self.acknowledged.append(qualified_offset)
            return
        topic, partition, offset = (getattr(qualified_offset, name) for name in ("topic", "partition", "offset"))
        topic = topic.decode() if isinstance(topic, bytes) else str(topic)
        if problem := await self._acknowledge(topic, int(partition), int(offset)):
            raise NotAcknowledged(problem)

    def set_drain_callback(self, callback: Callback) -> None:
        """Call this, plain or async, before partitions are released, and before the worker ends.

        The events of these partitions have ended by then. The next callback comes after further events only.
        """
        self.on_drain = callback

    def set_termination_callback(self, callback: Callback) -> None:
        """Call this, plain or async, as the last thing before the worker ends."""
        self.on_termination = callback

    def call_function(
        self,
        function_name: str,
        event: Any,
        node: object = None,
        timeout: float | None = None,
        service_name_override: str | None = None,
    ) -> Response:
        """Send an event to another function by HTTP and return its response; `node` is unused, as in Nuclio.

        Raises:
            ConnectionError: The function cannot be reached.
        """
        import http.client
        import json
        from urllib.parse import urlsplit

        space = f"{self.namespace}-" if self.kind == "local" else ""
        service = service_name_override or f"nuclio-{space}{function_name}"
        url = os.environ.get("NUCLIO_FUNCTION_URL", "http://{service}:8080").format(service=service, name=function_name)
        secure, host, is_json = url.startswith("https:"), urlsplit(url).netloc, isinstance(event.body, dict)
        provider = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = (self._connection_provider or provider)(host, timeout=timeout)
        sent = {name: value for name, value in event.headers.items() if value and name.lower() != "content-length"}
        sent["Content-Type"] = "application/json" if is_json else event.content_type or "text/plain"
        sent.setdefault("X-Nuclio-Target", function_name)
        body = json.dumps(event.body) if is_json else event.body
        try:
            connection.request(event.method or "POST", "/" + event.path.lstrip("/"), body, sent)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as cause:
            hint = "set NUCLIO_FUNCTION_URL in spec.env, such as http://{name}.example:8080"
            raise ConnectionError(f"failed to reach function {function_name} at {url}: {cause}; {hint}") from cause
        finally:
            connection.close()
        headers = {name.lower(): value for name, value in response.getheaders()}
        kind = headers.get("content-type", "text/plain")
        return Response(headers, json.loads(data) if kind == "application/json" else data, kind, response.status)


class Context:
    """State of one worker: logger, `user_data`, `Response`, `platform`, the trigger."""

    Response = Response

    def __init__(
        self,
        logger: Logger | None = None,
        platform: Platform | None = None,
        worker_id: str = "0",
        trigger: TriggerInfo | None = None,
    ) -> None:
        """Make a context; handlers' own tests may: `Context()`."""
        self.logger = logger or Logger()
        self.platform = platform or Platform()
        self.worker_id = worker_id
        self.trigger = trigger or TriggerInfo()
        self.trigger_name = self.trigger.name
        self.user_data: Any = SimpleNamespace()
        """An attribute bag of this worker process, for what `init_context` prepares."""
        self.emitted: list[tuple[str, Any, Any, Any]] = []
        """Without a worker, as in handlers' own tests: the arguments of each call of `emit`."""
        self._emit: Callable[[str, Any, Any, Any, Event | None], None] = lambda *all: self.emitted.append(all[:4])
        self._at_work: Callable[[], Event | None] = lambda: None

    def emit(
        self, topic: str, key: Any = None, value: Any = None, headers: Any = None, event: Event | None = None
    ) -> None:
        """Write a record when the call of the handler has succeeded; nothing is written if it fails.

        Args:
            topic: Its topic; empty for the trigger's `outputTopic`.
            key: Bytes or text, anything else as `outputFormat` says; None for the key of the event.
            value: Likewise; None for a tombstone.
            headers: A mapping, or pairs if names repeat.
            event: In a batch, the event that it belongs to.

        Raises:
            RuntimeError: No call of the handler is at work.
            ValueError: No topic has this name, or there is none.
            TypeError: The output format cannot hold the value or key.
        """
        self._emit(topic, key, value, headers, event)


def print_line(level: str, message: str, fields: dict[str, Any]) -> None:
    """Write one log line to standard error."""
    extra = "".join(f" {name}={value!r}" for name, value in fields.items())
    sys.stderr.write(f"{level} {message}{extra}\n")
