"""The headers that other products add to a dead letter, byte for byte."""

from __future__ import annotations

from headrace.records import Header

_ADDED = {
    "connect": (
        "__connect.errors.",
        {
            "connector.name": "lake",
            "task.id": "0",
            "stage": "VALUE_CONVERTER",
            "class.name": "org.apache.kafka.connect.json.JsonConverter",
            "exception.class.name": "org.apache.kafka.connect.errors.DataException",
            "exception.message": "Converting byte[] failed",
            "exception.stacktrace": "org.apache...\n\tat Json",
        },
    ),
    "streams": (
        "__streams.errors.",
        {
            "exception": "java.lang.ArithmeticException: / by zero",
            "message": "/ by zero",
            "stacktrace": "java...\n\tat App",
        },
    ),
    "share": (
        "__dlq.errors.",
        {"group": "work", "delivery.count": "5", "message": "Offset delivery count exceeded the threshold."},
    ),
    "smallrye": (
        "dead-letter-",
        {
            "exception-class-name": "java.util.concurrent.CompletionException",
            "reason": "wrapped",
            "cause-class-name": "com.acme.NoStock",
            "cause": "no stock of 7",
        },
    ),
}
"""The beginning of the names, and what is beside the position, of writers whose headers are all text."""
WRITERS = ("spring", "spring-retry", "connect", "streams", "share", "smallrye")


def written_by(writer: str, topic: str, partition: int, offset: int) -> list[Header]:
    """Return what a writer adds to a record of this position."""
    position = {"topic": topic, "partition": str(partition), "offset": str(offset)}
    binary = {"topic": topic.encode(), "partition": partition.to_bytes(4), "offset": offset.to_bytes(8)}
    if writer.startswith("spring"):
        start = "kafka_" if writer == "spring-retry" else "kafka_dlt-"
        failure = {
            "fqcn": "org.springframework.kafka.listener.ListenerExecutionFailedException",
            "cause-fqcn": "com.acme.CardDeclined",
            "message": "Listener failed; card 7 declined\nat",
            "stacktrace": "org...\n\tat com.acme.Pay",
        }
        retried: list[Header] = [("retry_topic-attempts", (4).to_bytes(4))] if start == "kafka_" else []
        return [
            *((f"{start}original-{name}", data) for name, data in binary.items()),
            (f"{start}original-timestamp", (1_700_000_000_000).to_bytes(8)),
            (f"{start}original-timestamp-type", b"CreateTime"),
            ("kafka_dlt-original-consumer-group", b"billing"),
            *((f"{start}exception-{name}", text.encode()) for name, text in failure.items()),
            *retried,
        ]
    start, added = _ADDED[writer]
    return [(start + name, text.encode()) for name, text in {**position, **added}.items()]
