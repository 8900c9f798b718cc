"""What a produce request is answered: an entry per record, and the status of the whole.

Source: sidecar.md 5.5; decisions.md 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from headrace import errors
from headrace.records import Produced

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
    errors.BatchRefused: 50003,
    errors.TransactionAborted: 50003,
}
_OTHER: Final = 50002
_INVALID: Final = 40002
_RequestStatus = Literal["OK", "UNAUTHORIZED", "FORBIDDEN"]
_REQUEST_STATUS: Final[dict[int, _RequestStatus]] = {40101: "UNAUTHORIZED", 40301: "FORBIDDEN"}
_encode_json = msgspec.json.Encoder().encode


class ProduceError(msgspec.Struct, rename="camel"):
    """Why one record of a request is not, or perhaps not, in Kafka."""

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
    """Absent where no record is written and the answer is an error, which says why."""
    acks: Literal[1, 0] | msgspec.UnsetType = msgspec.UNSET
    """Present where an entry without error is weaker than ok: the leader alone has it (1), or none said so (0)."""
    ignored_fields: Sequence[str] | msgspec.UnsetType = msgspec.UNSET
    """Fields of the request that are not known, at most 20 (`producer.unknown_fields: ignore`)."""


class ProduceAnswer(NamedTuple):
    """The HTTP answer to a produce request."""

    status: int
    body: bytes
    retry_after_seconds: int | None = None
    asked_records: int = 0
    """Records of the request."""
    written_records: int = 0
    """Those of them that are certainly in Kafka."""


def answer_of(
    results: Sequence[Produced | errors.HeadraceError],
    key_schema_id: int | None,
    value_schema_id: int | None,
    always_200: bool,
    acks: Literal["all", 1, 0] = "all",
    ignored: Sequence[str] = (),
) -> ProduceAnswer:
    """Return the answer for the outcomes of all records, in their order."""
    failures = [result for result in results if type(result) is not Produced]
    written = len(results) - len(failures)
    failed = bool(failures) and not written and not always_200
    body = _encode_json(response_of(results, key_schema_id, value_schema_id, acks, ignored, failed=failed))
    status, retry_after = 200, None
    if failed:
        reason = reason_of(failures)
        status, retry_after = reason.status, reason.retry_after_seconds
        body = body[:-1] + b"," + _encode_json(reason.body())[1:]
    return ProduceAnswer(status, body, retry_after, len(results), written)


def response_of(
    results: Sequence[Produced | errors.HeadraceError],
    key_schema_id: int | None,
    value_schema_id: int | None,
    acks: Literal["all", 1, 0] = "all",
    ignored: Sequence[str] = (),
    *,
    failed: bool,
) -> ProduceResponse:
    """Return the part of an answer that tells of each record; `failed`: the answer as a whole is an error."""
    failures = [result for result in results if type(result) is not Produced]
    request_status = _request_status(failures)
    return ProduceResponse(
        offsets=[_entry(result) for result in results] if failures else results,
        key_schema_id=msgspec.UNSET if key_schema_id is None else key_schema_id,
        value_schema_id=msgspec.UNSET if value_schema_id is None else value_schema_id,
        request_status=msgspec.UNSET if failed and request_status == "OK" else request_status,
        acks=msgspec.UNSET if acks == "all" else acks,
        ignored_fields=ignored or msgspec.UNSET,
    )


def _entry(result: Produced | errors.HeadraceError) -> Produced | ProduceError:
    return result if isinstance(result, Produced) else failure_of(result)


def failure_of(error: errors.HeadraceError) -> ProduceError:
    """Return the entry of a record that was not, or perhaps not, written."""
    return ProduceError(_code_of(error), error.description, "unknown" if isinstance(error, _UNKNOWN) else "fail")


def _code_of(error: errors.HeadraceError) -> int:
    if code := _CODES.get(type(error)):
        return code
    if isinstance(error, errors.KafkaError):
        return _OTHER
    return _INVALID if error.status < 500 else _CODES[errors.KafkaUnavailable]


def _request_status(failures: Sequence[Any]) -> _RequestStatus:
    named = (_REQUEST_STATUS.get(_code_of(failure)) for failure in failures)
    return next((status for status in named if status), "OK")


def reason_of(failures: Sequence[Any]) -> errors.HeadraceError:
    """Return the error that speaks for a request of which no record was written.

    An unknown outcome weighs most, then what only a change of the request helps against, then what passes by itself.
    """
    unknown: errors.HeadraceError | None = next((error for error in failures if isinstance(error, _UNKNOWN)), None)
    if unknown and unknown.parameters.get("keyed"):
        return errors.KafkaTimeout(f"send it again with the same Idempotency-Key. {unknown.description}")
    if unknown:
        return errors.KafkaTimeout(
            "no record of the request is known to be written, and of at least one it is not known: "
            f"read the topic before you send it again. {unknown.description}",
            retriable=False,
        )
    lasting: errors.HeadraceError | None = next((error for error in failures if not error.retriable), None)
    return lasting or failures[0]
