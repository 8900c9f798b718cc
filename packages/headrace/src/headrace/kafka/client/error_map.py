"""Translates the client's errors to those of `errors.py`; used where a client call can fail."""

from collections.abc import Callable, Iterable

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.kafka.client import library
from headrace.kafka.client.access import KIND_OF, Right, is_refused, missing_right, refusal_in
from headrace.records import OutgoingRecord


class ClientErrors:
    """Raises a `KafkaException` for what a client's call raises when a fatal error and a delivery report meet.

    That is a `KafkaError`, which is not an exception class, so not even `except BaseException` catches it. Or it is a
    `SystemError` of the report's callback, caused by the `KafkaException` of the fatal error.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, library.KafkaError):
            raise library.KafkaException(error) from None
        if isinstance(error, SystemError) and isinstance(error.__cause__, library.KafkaException):
            raise error.__cause__ from None


_KIND = {
    errors.TopicNotFound: "UNKNOWN_TOPIC_OR_PART _UNKNOWN_TOPIC UNKNOWN_TOPIC_ID TOPIC_EXCEPTION",
    errors.PartitionNotFound: "_UNKNOWN_PARTITION",
    errors.KafkaUnauthorized: """
        TOPIC_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED
        TRANSACTIONAL_ID_AUTHORIZATION_FAILED DELEGATION_TOKEN_AUTHORIZATION_FAILED
    """,
    errors.KafkaUnauthenticated: "_AUTHENTICATION SASL_AUTHENTICATION_FAILED _SSL ILLEGAL_SASL_STATE",
    errors.RecordTooLarge: "MSG_SIZE_TOO_LARGE RECORD_LIST_TOO_LARGE",
    errors.RecordRefused: "INVALID_RECORD INVALID_TIMESTAMP _INVALID_DIFFERENT_RECORD",
    errors.ProducerQueueFull: "_QUEUE_FULL",
    errors.KafkaTimeout: "_MSG_TIMED_OUT _TIMED_OUT _TIMED_OUT_QUEUE REQUEST_TIMED_OUT _PURGE_INFLIGHT",
    errors.KafkaUnavailable: """
        _TRANSPORT _ALL_BROKERS_DOWN _RESOLVE _WAIT_COORD _PURGE_QUEUE BROKER_NOT_AVAILABLE
        CONCURRENT_TRANSACTIONS COORDINATOR_NOT_AVAILABLE COORDINATOR_LOAD_IN_PROGRESS
        ELIGIBLE_LEADERS_NOT_AVAILABLE FENCED_LEADER_EPOCH INCONSISTENT_TOPIC_ID KAFKA_STORAGE_ERROR
        LEADER_NOT_AVAILABLE LISTENER_NOT_FOUND NETWORK_EXCEPTION NOT_CONTROLLER NOT_COORDINATOR
        NOT_ENOUGH_REPLICAS NOT_LEADER_FOR_PARTITION OFFSET_NOT_AVAILABLE PREFERRED_LEADER_NOT_AVAILABLE
        REPLICA_NOT_AVAILABLE STALE_BROKER_EPOCH UNKNOWN_LEADER_EPOCH UNSTABLE_OFFSET_COMMIT
    """,
    errors.TransactionAborted: """
        INVALID_PRODUCER_ID_MAPPING INVALID_TXN_STATE TRANSACTION_ABORTABLE UNKNOWN_PRODUCER_ID
    """,
    errors.FatalKafkaError: "_FATAL _FENCED INVALID_PRODUCER_EPOCH OUT_OF_ORDER_SEQUENCE_NUMBER PRODUCER_FENCED",
}
"""Class of our error to the names of Kafka's errors that it covers."""


def _codes(names: str) -> set[int]:
    """Return the codes of Kafka's errors with these names, as far as the client knows them."""
    return {getattr(library.KafkaError, name) for name in names.split() if hasattr(library.KafkaError, name)}


_CLASS_OF = {code: kind for kind, names in _KIND.items() for code in _codes(names)}
_NO_CONFIG = KafkaConfig()
ClientProblem = library.KafkaError | library.KafkaException

_ADVICE = {
    library.KafkaError.CONCURRENT_TRANSACTIONS: "Kafka is still ending an earlier transaction of this "
    "producer; nothing was lost, send again later."
}
"""Advice in place of the docstring of the class."""

# Written to the leader, not yet to enough replicas: the record may well be read later.
_WRITTEN_PERHAPS = {library.KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, library.KafkaError.REQUEST_TIMED_OUT}

_CERTAINLY_NOT_WRITTEN = _codes(
    """
    TOPIC_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED POLICY_VIOLATION UNSUPPORTED_FOR_MESSAGE_FORMAT
    UNSUPPORTED_COMPRESSION_TYPE
    """
).union(
    _codes(_KIND[errors.TopicNotFound]),
    _codes(_KIND[errors.PartitionNotFound]),
    _codes(_KIND[errors.RecordTooLarge]),
    _codes(_KIND[errors.RecordRefused]),
)


def report_error(
    error: library.KafkaError, topic: str, kafka: KafkaConfig = _NO_CONFIG, *, perhaps_written: bool = True
) -> errors.HeadraceError:
    """Return our error for a delivery report.

    The client names only the error of the last attempt: an earlier attempt may have been written and its response lost.
    So an error that an earlier attempt may not have met is `KafkaTimeout` or `FatalKafkaError`: unknown.

    Args:
        perhaps_written: False if librdkafka says that no attempt can have been written. Its Python binding does not.
    """
    found = write_error(error, kafka, topic)
    if not perhaps_written and isinstance(found, errors.KafkaTimeout):
        return errors.KafkaUnavailable(f"{found.cause}. {errors.KafkaUnavailable.__doc__}", **found.parameters)
    known = not perhaps_written or error.code() in _CERTAINLY_NOT_WRITTEN
    if known or isinstance(found, errors.KafkaTimeout | errors.FatalKafkaError):
        return found
    return errors.KafkaTimeout(f"{found.description} An earlier attempt may have been written.", **found.parameters)


def refusal_error(
    cause: Exception, kafka: KafkaConfig, topic: str, refusal: library.KafkaError | None = None
) -> errors.HeadraceError:
    """Return our error for a record that a client did not take; `refusal` is why it may write to no topic."""
    if isinstance(cause, BufferError):
        return errors.ProducerQueueFull("the client's queue is full: send this record again after a pause")
    if not isinstance(cause, library.KafkaException):
        return errors.RecordRefused(f"produce to {topic}: the client did not take the record: {cause!r}")
    return write_error(refusal or refusal_in(cause.args[0]) or cause, kafka, topic)


def write_error(cause: ClientProblem, kafka: KafkaConfig, *topics: str) -> errors.HeadraceError:
    """Return our error for records that a client failed to write to topics, perhaps for lack of the right."""
    return to_error(cause, f"produce to {', '.join(topics)}", kafka, *(Right("Write", "topic", t) for t in topics))


def refused_records(
    begin_again: Callable[[], None], kafka: KafkaConfig, records: Iterable[OutgoingRecord]
) -> errors.HeadraceError | None:
    """Return the error for a right that a failed transaction lacks, which its reports may not name; else None."""
    try:
        begin_again()  # refused within a transaction, with the error that this one has
    except library.KafkaException as cause:
        if is_refused(cause.args[0]):
            return write_error(cause, kafka, *sorted({record.topic for record in records}))
    return None


def repeat_error(topic: str, partition: int) -> errors.HeadraceError:
    """Return the error for a record that is written at an unknown offset.

    This happens to a repeat that the leader recognises, if the first attempt is not among the producer's last batches.
    Source: KIP-98, DUPLICATE_SEQUENCE_NUMBER, which the client reports as a success without an offset.
    """
    return errors.KafkaTimeout(
        f"produce to {topic}: written to partition {partition}, at an unknown offset, "
        "because the first acknowledgement was lost: do not send it again"
    )


def to_error(cause: ClientProblem, doing: str, kafka: KafkaConfig = _NO_CONFIG, *needed: Right) -> errors.HeadraceError:
    """Return our error for a client's error, with missing rights; its text begins with `doing`: "produce to orders"."""
    error = cause.args[0] if isinstance(cause, library.KafkaException) else cause
    number = error.code()
    if is_refused(error):  # also if it is fatal to the client
        text = f"{doing}: {missing_right(KIND_OF[number], kafka, needed)} ({error.name()})"
        return errors.KafkaUnauthorized(text, kafka_code=number, kafka_name=error.name())
    kind = errors.FatalKafkaError if error.fatal() else _CLASS_OF.get(number, errors.KafkaError)
    if number in _WRITTEN_PERHAPS:
        kind = errors.KafkaTimeout
    why = f"{doing}: {error.str()} ({error.name()})"
    text = why if kind is errors.KafkaError else f"{why}. {_ADVICE.get(number, kind.__doc__)}"
    return kind(text, cause=why, kafka_code=number, kafka_name=error.name())
