"""The response to a produce request: an entry per record, and the status of the whole."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from headrace import errors
from headrace.http.messages import HttpResponse, retry_after
from headrace.http.request import Headers
from headrace.kafka.write_request import failures_of
from headrace.records import OutgoingRecord, Produced, WrittenRecords
from headrace.runtime.telemetry.tracing import TraceSpan

_UNKNOWN: Final = (errors.KafkaTimeout, errors.FatalKafkaError, errors.InternalError)
_CODES: Final[dict[type[errors.HeadraceError], int]] = {
    errors.KafkaTimeout: 50004,
    errors.FatalKafkaError: 50004,
    errors.InternalError: 50004,
    errors.KafkaUnauthenticated: 40101,
    errors.KafkaUnauthorized: 40301,
    errors.TopicNotFound: 40401,
    errors.PartitionNotFound: 40402,
    errors.KafkaUnavailable: 50003,
    errors.ProducerQueueFull: 50003,
    errors.TransactionAborted: 50003,
}
_OTHER: Final = 50002
_INVALID: Final = 40002
_RequestStatus = Literal["OK", "UNAUTHORIZED", "FORBIDDEN"]
_REQUEST_STATUS: Final[dict[int, _RequestStatus]] = {40101: "UNAUTHORIZED", 40301: "FORBIDDEN"}
_encode_json = msgspec.json.Encoder().encode
_ALL_WRITTEN: Final = b'{"offsets":[%b],"requestStatus":"OK"}'
"""A `ProduceResponse` to a request whose records are all written, as almost all are."""


Result = Produced | errors.HeadraceError
"""Where a record was written, or why it was not."""


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """A request's records, encoded."""

    records: list[OutgoingRecord]
    key_schema_id: int | None = None
    """None where no schema was needed."""
    value_schema_id: int | None = None
    size_bytes: int | None = None
    """The size for the byte budget; None to compute it from the records."""
    ignored_fields: Sequence[str] = ()
    """Unknown fields of the request, if they are allowed."""
    partitions: int = 0
    """Number of partitions of the topic; 0 if there are several topics."""
    write: TraceSpan | None = None
    """The span of the write, if it is traced."""


class ProduceError(msgspec.Struct, rename="camel"):
    """Why one record of a request is not, or may not be, in Kafka."""

    error_code: int
    error: str
    outcome: Literal["fail", "unknown"]


_ENTRIES: Final = {"oneOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (Produced, ProduceError)]}
_RENAMED: Final = {"request_status": "requestStatus", "ignored_fields": "ignoredFields"}


class ProduceResponse(msgspec.Struct, kw_only=True, rename=_RENAMED):
    """An outcome for each record of the request, in their order."""

    offsets: Annotated[Sequence[Any], msgspec.Meta(extra_json_schema={"items": _ENTRIES})]
    key_schema_id: int | msgspec.UnsetType = msgspec.UNSET
    value_schema_id: int | msgspec.UnsetType = msgspec.UNSET
    request_status: _RequestStatus | msgspec.UnsetType = msgspec.UNSET
    """Absent if the whole response is an error."""
    acks: Literal[1, 0] | msgspec.UnsetType = msgspec.UNSET
    """Present if success promises less: only the leader (1) or no broker (0) has confirmed the record."""
    ignored_fields: Sequence[str] | msgspec.UnsetType = msgspec.UNSET
    """Unknown fields of the request, at most 20 (`producer.unknown_fields: ignore`)."""


class EncodedResponse(msgspec.Struct, frozen=True, gc=False):
    """The HTTP response to a produce request."""

    status: int
    body: bytes
    retry_after_seconds: int | None = None
    requested_records: int = 0
    written_records: int = 0
    """Records that are certainly in Kafka."""

    @property
    def is_plain(self) -> bool:
        """Whether it is successful JSON without other headers."""
        return self.status == 200

    @property
    def headers(self) -> Headers:
        return HttpResponse(self.body, self.status, headers=retry_after(self.retry_after_seconds)).headers


def response_of(
    prepared: Prepared, results: Sequence[Result], always_200: bool, acks: Literal["all", 1, 0] = "all"
) -> EncodedResponse:
    """Return the response for the results of all records, in order."""
    is_plain = prepared.key_schema_id is None and prepared.value_schema_id is None and not prepared.ignored_fields
    if is_plain and acks == "all" and isinstance(results, WrittenRecords):
        total = len(prepared.records)
        return EncodedResponse(200, _ALL_WRITTEN % results.entries, None, total, total)
    failures = failures_of(results)
    written = len(results) - len(failures)
    reason = reason_of(failures) if failures and not written and not always_200 else None
    body = _encode_json(entries_of(prepared, results, failures, acks, failed=reason is not None))
    return with_reason(body, reason, len(results), written)


def with_reason(body: bytes, reason: errors.HeadraceError | None, requested: int, written: int) -> EncodedResponse:
    """Return the response with a body; `reason` is its error, if the whole response is an error."""
    if reason is None:
        return EncodedResponse(200, body, None, requested, written)
    body = body[:-1] + b"," + _encode_json(reason.body())[1:]
    return EncodedResponse(reason.status, body, reason.retry_after_seconds, requested, written)


def entries_of(
    prepared: Prepared,
    results: Sequence[Result],
    failures: Sequence[errors.HeadraceError],
    acks: Literal["all", 1, 0] = "all",
    *,
    failed: bool,
) -> ProduceResponse:
    """Return the entries of a response.

    `failures` are the errors among the results; `failed` is whether the whole response is an error.
    """
    status: _RequestStatus = "OK"
    offsets: Sequence[Any] = [*results]
    if failures:
        named = (_REQUEST_STATUS.get(_code_of(failure)) for failure in failures)
        status = next((one for one in named if one), "OK")
        offsets = [result if isinstance(result, Produced) else failure_of(result) for result in results]
    keys, values = prepared.key_schema_id, prepared.value_schema_id
    return ProduceResponse(
        offsets=offsets,
        key_schema_id=msgspec.UNSET if keys is None else keys,
        value_schema_id=msgspec.UNSET if values is None else values,
        request_status=msgspec.UNSET if failed and status == "OK" else status,
        acks=msgspec.UNSET if acks == "all" else acks,
        ignored_fields=prepared.ignored_fields or msgspec.UNSET,
    )


def failure_of(error: errors.HeadraceError) -> ProduceError:
    """Return the entry of a record that was not written, or may not have been."""
    return ProduceError(_code_of(error), error.description, "unknown" if isinstance(error, _UNKNOWN) else "fail")


def _code_of(error: errors.HeadraceError) -> int:
    if code := _CODES.get(type(error)):
        return code
    if isinstance(error, errors.KafkaError):
        return _OTHER
    return _INVALID if error.status < 500 else _CODES[errors.KafkaUnavailable]


def reason_of(failures: Sequence[errors.HeadraceError]) -> errors.HeadraceError:
    """Return the error of a request if no record was written.

    Unknown outcomes come first, then errors that a retry cannot resolve, then the others.
    """
    unknown: errors.HeadraceError | None = next((error for error in failures if isinstance(error, _UNKNOWN)), None)
    if unknown and unknown.parameters.get("keyed"):
        return errors.KafkaTimeout(f"send it again with the same Idempotency-Key. {unknown.description}")
    if unknown:
        return errors.KafkaTimeout(
            "the outcome of at least one record is unknown, and no other was written: "
            f"read the topic before you send it again. {unknown.description}",
            retriable=False,
        )
    lasting: errors.HeadraceError | None = next((error for error in failures if not error.retriable), None)
    return lasting or failures[0]
