"""Every metric: name, type, unit, labels and help. `docs/reference/metrics.md` is made from it."""

from typing import Final, Literal, NamedTuple

MetricType = Literal["counter", "gauge", "histogram"]

_DELIVERY: Final = ("kind", "consumer")


class MetricSpec(NamedTuple):
    """What a metric is called and what it means."""

    name: str
    """As Prometheus shows it: a counter ends in `_total`."""
    type: MetricType
    unit: str
    labels: tuple[str, ...]
    help: str


CATALOGUE: Final = (
    MetricSpec("headrace_ready", "gauge", "0 or 1", (), "1 while readiness answers 200"),
    MetricSpec(
        "headrace_kafka_up", "gauge", "0 or 1", ("bootstrap_servers",), "1 while a broker of this cluster answers"
    ),
    MetricSpec(
        "headrace_http_request_seconds",
        "histogram",
        "seconds",
        ("route", "status"),
        "Time from the head of a request to the end of its answer",
    ),
    MetricSpec("headrace_produce_requested_records_total", "counter", "records", (), "Records in produce requests"),
    MetricSpec(
        "headrace_produce_acknowledged_records_total",
        "counter",
        "records",
        (),
        "Records of produce requests that Kafka acknowledged",
    ),
    MetricSpec(
        "headrace_producer_pending_bytes",
        "gauge",
        "bytes",
        ("producer",),
        "Bytes handed to a Kafka producer and not yet acknowledged",
    ),
    MetricSpec(
        "headrace_waiting_transactions", "gauge", "transactions", (), "Transactions that are not finished, or not begun"
    ),
    MetricSpec("headrace_idempotency_keys", "gauge", "keys", (), "Idempotency keys that are remembered"),
    MetricSpec("headrace_received_records_total", "counter", "records", _DELIVERY, "Records received from Kafka"),
    MetricSpec(
        "headrace_ended_records_total",
        "counter",
        "records",
        (*_DELIVERY, "outcome"),
        "Records that ended, each counted under one outcome; a record that went to a retry topic is received again",
    ),
    MetricSpec("headrace_open_records", "gauge", "records", _DELIVERY, "Records received and not ended"),
    MetricSpec(
        "headrace_redelivered_records_total", "counter", "records", _DELIVERY, "Attempts after the first, in records"
    ),
    MetricSpec(
        "headrace_refused_deliveries_total",
        "counter",
        "deliveries",
        _DELIVERY,
        "Deliveries that the destination as a whole did not take",
    ),
    MetricSpec("headrace_breaker_open", "gauge", "0 or 1", _DELIVERY, "1 while the breaker of a consumer is open"),
    MetricSpec(
        "headrace_gap_offsets_total",
        "counter",
        "offsets",
        _DELIVERY,
        "Offsets that were removed from the log before they were read, and passed because `on_gap` says so",
    ),
    MetricSpec(
        "headrace_ended_before_records_total",
        "counter",
        "records",
        _DELIVERY,
        "Records that had ended before a restart or rebalance, and are not delivered again",
    ),
    MetricSpec(
        "headrace_abandoned_records_total",
        "counter",
        "records",
        _DELIVERY,
        "Records in flight when their partition was given up; they are delivered again",
    ),
    MetricSpec(
        "headrace_late_records_total",
        "counter",
        "records",
        _DELIVERY,
        "Records whose answer came after their partition was given up; they are delivered again",
    ),
    MetricSpec(
        "headrace_corrupt_records_total", "counter", "records", _DELIVERY, "Records of a flow that were not a row"
    ),
    MetricSpec(
        "headrace_tombstone_records_total", "counter", "records", _DELIVERY, "Records of a flow that had no value"
    ),
    MetricSpec(
        "headrace_consumer_lag_records",
        "gauge",
        "records",
        ("group", "topic", "partition"),
        "Records that a group has not committed; absent while that is not known",
    ),
    MetricSpec(
        "headrace_function_waiting_frames", "gauge", "frames", _DELIVERY, "Frames of records that wait for a worker"
    ),
    MetricSpec("headrace_function_busy_workers", "gauge", "workers", _DELIVERY, "Workers that run a handler"),
    MetricSpec(
        "headrace_function_worker_restarts_total",
        "counter",
        "workers",
        _DELIVERY,
        "Workers that ended and were replaced",
    ),
    MetricSpec("headrace_registrations", "gauge", "consumers", (), "Registered consumers that the control topic holds"),
    MetricSpec(
        "headrace_refused_registrations",
        "gauge",
        "consumers",
        (),
        "Registered consumers that the configuration no longer allows, or whose entry is damaged",
    ),
    MetricSpec("headrace_running_registrations", "gauge", "consumers", (), "Registered consumers that run here"),
    MetricSpec(
        "headrace_failing_registrations",
        "gauge",
        "consumers",
        (),
        "Registered consumers that failed and wait for their next start",
    ),
    MetricSpec(
        "headrace_corrupt_control_entries", "gauge", "entries", (), "Entries of the control topic that cannot be read"
    ),
    MetricSpec(
        "headrace_audit_notes_total",
        "counter",
        "notes",
        ("outcome",),
        "Notes of the audit: `written`, `lost` on the way, or `dropped` because the queue was full",
    ),
    MetricSpec("headrace_audit_pending_notes", "gauge", "notes", (), "Notes of the audit that are not yet written"),
)

OUTCOMES: Final = {
    "delivered": "the backend or the handler took the record",
    "dead_letter": "the record is in the dead letter topic",
    "retry_topic": "the record is in a retry topic, from which it is delivered again",
    "skipped": "the record failed, and the policy says that this failure counts as handled",
    "skipped_by_operator": "an operator ended the record without a delivery",
    "delegated": "the record was not delivered here: it is blocked by its key, was delivered before, or not requested",
    "discarded": "the record failed for good, and there is no dead letter topic for it",
}
"""Values of the label `outcome` of `headrace_ended_records_total`."""

BY_NAME: Final = {spec.name: spec for spec in CATALOGUE}
