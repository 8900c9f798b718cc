"""The fields of log lines about records, for JSON: the text for people has them already."""

from typing import Any

from headrace.records import TRACEABILITY_ID, Record, TopicPartition

_MOST_CHARACTERS = 200


def record_fields(
    group: str,
    partition: TopicPartition,
    offset: int | None = None,
    *,
    record: Record | None = None,
    consumer: str = "",
) -> dict[str, Any]:
    """Return the argument `extra` of a log call, with what is known; a record has its offset and traceability id."""
    fields: dict[str, Any] = {"group": group, **partition._asdict()}
    if consumer:
        fields["consumer"] = consumer
    if record:
        offset = record.offset
        ids = [value for name, value in record.headers if value and name.lower() == TRACEABILITY_ID.lower()]
        if ids:
            fields["traceabilityId"] = ids[0].decode(errors="replace")[:_MOST_CHARACTERS]
    if offset is not None:
        fields["offset"] = offset
    return {"as_json": fields}
