"""Translates the client's errors to those of `errors.py`; used where a client call can fail."""

from __future__ import annotations

import confluent_kafka

from headrace import errors

_KIND = {
    errors.TopicNotFound: ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_ID", "TOPIC_EXCEPTION"),
    errors.PartitionNotFound: ("_UNKNOWN_PARTITION",),
    errors.KafkaUnauthorized: (
        "TOPIC_AUTHORIZATION_FAILED",
        "GROUP_AUTHORIZATION_FAILED",
        "CLUSTER_AUTHORIZATION_FAILED",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        "DELEGATION_TOKEN_AUTHORIZATION_FAILED",
    ),
    errors.KafkaUnauthenticated: ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL", "ILLEGAL_SASL_STATE"),
    errors.RecordTooLarge: ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"),
    errors.RecordRefused: ("INVALID_RECORD", "INVALID_TIMESTAMP"),
    errors.BatchRefused: ("_INVALID_DIFFERENT_RECORD",),
    errors.ProducerQueueFull: ("_QUEUE_FULL",),
    errors.KafkaTimeout: ("_MSG_TIMED_OUT", "_TIMED_OUT", "_TIMED_OUT_QUEUE", "REQUEST_TIMED_OUT", "_PURGE_INFLIGHT"),
    errors.KafkaUnavailable: (
        "_TRANSPORT",
        "_ALL_BROKERS_DOWN",
        "_RESOLVE",
        "_WAIT_COORD",
        "_PURGE_QUEUE",
        "BROKER_NOT_AVAILABLE",
        "CONCURRENT_TRANSACTIONS",
        "COORDINATOR_NOT_AVAILABLE",
        "COORDINATOR_LOAD_IN_PROGRESS",
        "ELIGIBLE_LEADERS_NOT_AVAILABLE",
        "FENCED_LEADER_EPOCH",
        "INCONSISTENT_TOPIC_ID",
        "KAFKA_STORAGE_ERROR",
        "LEADER_NOT_AVAILABLE",
        "LISTENER_NOT_FOUND",
        "NETWORK_EXCEPTION",
        "NOT_CONTROLLER",
        "NOT_COORDINATOR",
        "NOT_ENOUGH_REPLICAS",
        "NOT_LEADER_FOR_PARTITION",
        "OFFSET_NOT_AVAILABLE",
        "PREFERRED_LEADER_NOT_AVAILABLE",
        "REPLICA_NOT_AVAILABLE",
        "STALE_BROKER_EPOCH",
        "UNKNOWN_LEADER_EPOCH",
        "UNSTABLE_OFFSET_COMMIT",
    ),
    errors.TransactionAborted: (
        "INVALID_PRODUCER_ID_MAPPING",
        "INVALID_TXN_STATE",
        "TRANSACTION_ABORTABLE",
        "UNKNOWN_PRODUCER_ID",
    ),
    errors.FatalKafkaError: (
        "_FATAL",
        "_FENCED",
        "INVALID_PRODUCER_EPOCH",
        "OUT_OF_ORDER_SEQUENCE_NUMBER",
        "PRODUCER_FENCED",
    ),
}
_CLASS_OF = {
    getattr(confluent_kafka.KafkaError, name): kind
    for kind, names in _KIND.items()
    for name in names
    if hasattr(confluent_kafka.KafkaError, name)
}

# Written to the leader, not yet to enough replicas: the record may well be read later.
_WRITTEN_PERHAPS = {
    confluent_kafka.KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    confluent_kafka.KafkaError.REQUEST_TIMED_OUT,
}

_CERTAINLY_NOT_WRITTEN = {
    getattr(confluent_kafka.KafkaError, name)
    for name in (
        *_KIND[errors.TopicNotFound],
        *_KIND[errors.PartitionNotFound],
        *_KIND[errors.RecordTooLarge],
        *_KIND[errors.RecordRefused],
        *_KIND[errors.BatchRefused],
        "TOPIC_AUTHORIZATION_FAILED",
        "CLUSTER_AUTHORIZATION_FAILED",
        "POLICY_VIOLATION",
        "UNSUPPORTED_FOR_MESSAGE_FORMAT",
        "UNSUPPORTED_COMPRESSION_TYPE",
    )
    if hasattr(confluent_kafka.KafkaError, name)
}


def report_error(error: confluent_kafka.KafkaError, doing: str, keyed: bool = False) -> errors.HeadraceError:
    """Return our error for a delivery report.

    The client names the last attempt's error only: an earlier attempt of the same record may have been written and its
    answer lost. So every error that not each attempt would have met is `KafkaTimeout` or `FatalKafkaError`: unknown.
    Librdkafka knows whether a record is "possibly persisted", and its Python binding does not show it.
    """
    if keyed and error.code() == confluent_kafka.KafkaError.INVALID_RECORD:
        # If one record of a batch is refused, the client reports all; a broker refuses only those without a key.
        error = confluent_kafka.KafkaError(confluent_kafka.KafkaError._INVALID_DIFFERENT_RECORD)
    found = to_error(error, doing)
    if error.code() in _CERTAINLY_NOT_WRITTEN or isinstance(found, errors.KafkaTimeout | errors.FatalKafkaError):
        return found
    return errors.KafkaTimeout(f"{found.description} An earlier attempt may have been written.", **found.parameters)


def repeat_error(record: confluent_kafka.Message) -> errors.HeadraceError:
    """Return the error for a record that is written at an unknown offset.

    This happens to a repeat that the leader recognises, if the first attempt is not among the producer's last batches.
    Source: KIP-98, DUPLICATE_SEQUENCE_NUMBER, which the client reports as a success without an offset.
    """
    return errors.KafkaTimeout(
        f"produce to {record.topic()}: written to partition {record.partition()}, at an unknown offset, "
        "because the first acknowledgement was lost: do not send it again"
    )


def to_error(cause: confluent_kafka.KafkaError | confluent_kafka.KafkaException, doing: str) -> errors.HeadraceError:
    """Return our error for a client's error.

    Args:
        cause: What the client reported.
        doing: What was attempted, as the start of a sentence: "produce to orders".
    """
    error = cause.args[0] if isinstance(cause, confluent_kafka.KafkaException) else cause
    number = error.code()
    kind = errors.FatalKafkaError if error.fatal() else _CLASS_OF.get(number, errors.KafkaError)
    if number in _WRITTEN_PERHAPS:
        kind = errors.KafkaTimeout
    advice = "" if kind is errors.KafkaError else f". {kind.__doc__}"
    text = f"{doing}: {error.str()} ({error.name()}){advice}"
    return kind(text, kafka_code=number, kafka_name=error.name())
