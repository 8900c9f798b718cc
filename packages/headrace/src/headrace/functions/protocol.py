"""The messages between the parent and a worker, which `framing` cuts from a stream.

The parent sends `Setup` once, then `Schema`, `Work` and `Drain`. The worker sends `Ready` or `Unfit` once, then in
order one `Done` or `Results` for each `Work`, and one `Drained` for each `Drain`. A `Work` that the parent has recalled
gets no response. The worker sends `HasDrainCallback` once if there is a callback. It may send `Ack` at any time, and
the parent answers each with one `Acked`. A `Work` has many records of one partition as columns, because the cost per
record limits the throughput. This module needs only the standard library and msgspec.
"""

from collections.abc import Callable

import msgspec

Header = tuple[str, bytes | None]
Headers = list[Header]

LOG_MARK = b"\x1e"
"""Begins a line of the worker's standard error that holds level, message and fields of a log record as JSON."""


class TriggerSetup(msgspec.Struct, array_like=True, frozen=True):
    """The settings of one trigger."""

    kind: str
    name: str
    key_format: str
    value_format: str
    output_format: str
    output_topic: str = ""
    """Empty: what the handler returns is not used, only its status."""
    batch_size: int = 0
    """The most events of one call; 0 if each call gets one event instead of a list."""
    requests: bool = False
    """Whether events are requests, and what the handler returns is their response."""


class Setup(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The settings of a worker."""

    handler: str
    """`module.sub:function`."""
    folder: str
    """The folder of the handler's module."""
    worker_id: str
    triggers: list[TriggerSetup]
    """Those that share the worker."""
    namespace: str
    log_level: str
    """Least level of the handler's log lines: `debug`, `info`, `warning` or `error`."""
    env: dict[str, str]


class Schema(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """A schema of records in later frames."""

    schema_id: int
    schema_type: str
    """`AVRO`, `JSON` or `PROTOBUF`."""
    text: str
    references: dict[str, str]
    """Texts of its references by name, in the order of their dependencies."""


class Work(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Records of one partition, one column per field, in offset order; or a request.

    A request has its id as key, its body as value, and `:method` and `:path` as its first headers, as in HTTP/2. The
    last output of its result is the response: its first header is `:status`. Without one the handler has failed.
    """

    topic: str
    partition: int
    partitions: int
    """Partitions of the topic; 0 when not known."""
    offsets: list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers | None] | None
    """None when no record has any."""
    trigger: int = 0
    """Index of the trigger in `Setup`."""
    in_order: bool = False
    """Whether no record may begin after one that failed."""


class Drain(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Partitions are about to be revoked: call the drain callback."""


class Acked(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """The response to an `Ack`."""

    number: int
    problem: str = ""
    """Why the record cannot be acknowledged; empty if it is."""


class Ready(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The handler is loaded and `init_context` has returned."""


class Unfit(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The worker cannot start; it ends after this."""

    reason: str


class Done(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Every record of the frame succeeded."""

    seconds: float = 0.0
    """How long the frame took in the worker."""
    bodies: list[bytes] = []
    """One per record, if each has one output, which has this body and nothing else; empty if none has an output."""


class Output(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One record to write."""

    body: bytes | None
    headers: Headers
    topic: str = ""
    """Empty for the trigger's output topic."""
    key: bytes | None = None
    """None for the key of the record at work."""


class Result(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The end of one record, other than success without output."""

    outputs: list[Output] = []
    error: str = ""
    """Class of the failure; empty on success."""
    reason: str = ""
    """Class and first line of the exception's text, or what the handler returned."""
    undecodable: bool = False
    """The bytes do not fit the format, so another attempt would fail too."""
    stack: str = ""
    """The traceback; empty if nothing was raised."""
    shared: bool = False
    """The call had several records, and this does not say which of them failed."""
    held: bool = False
    """Whether the record awaits its acknowledgement."""


AnyResult = Result | bytes | None
"""None is success without output; bytes are success with one output, which has this body and nothing else."""


class Results(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """One entry per record of the frame, or of its first records if the parent or a failure has stopped it."""

    results: list[AnyResult]
    seconds: float = 0.0
    """How long the frame took in the worker."""


class HasDrainCallback(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """The handler has set a drain callback."""


class Drained(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """The drain callback has ended."""

    problem: str = ""
    """The exception that it raised; empty if it returned."""


class Ack(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """The handler acknowledges a record."""

    number: int
    topic: str
    partition: int
    offset: int


ToWorker = Setup | Schema | Work | Drain | Acked
ToParent = Ready | Unfit | Done | Results | HasDrainCallback | Drained | Ack

decode_to_worker: Callable[[memoryview], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_parent: Callable[[memoryview], ToParent] = msgspec.msgpack.Decoder(ToParent).decode
