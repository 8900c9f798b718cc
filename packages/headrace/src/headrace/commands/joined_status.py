"""The status of consumers from several processes of one run, as one."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from headrace.commands.consumer_status import Details, PartitionDetails, Summary


def joined(lists: Iterable[Iterable[Summary]]) -> list[Summary]:
    """Return each consumer once: what each process has is added up, and of states the worst is shown."""
    by_name: dict[str, list[Summary]] = {}
    for one in (one for each in lists for one in each):
        by_name.setdefault(one.name, []).append(one)
    return [_summary(found) for found in by_name.values()]


def joined_details(found: Sequence[Details]) -> Details:
    """Return a consumer with each partition as the process sees it that has it; the first is that of this process."""
    partitions: dict[tuple[str, int], PartitionDetails] = {}
    for one in (one for each in found for one in each.partitions):
        key = one.topic, one.partition
        if one.assigned or key not in partitions:
            partitions[key] = one
    fields = msgspec.structs.asdict(_summary(found))
    for name in ("partitions", "commands"):
        fields.pop(name, None)
    in_order = [partitions[key] for key in sorted(partitions)]
    return Details(**fields, partitions=in_order, commands=found[0].commands)


def _summary(found: Sequence[Summary]) -> Summary:
    counts: Counter[str] = Counter()
    for one in found:
        counts.update(one.counts)
    return msgspec.structs.replace(
        found[0],
        breaker=next((one.breaker for one in found if one.breaker.state != "closed"), found[0].breaker),
        counts=dict(counts),
        partitions_assigned=sum(one.partitions_assigned for one in found),
        lag=next((one.lag for one in found if one.lag is not None), None),
        in_flight=sum(one.in_flight for one in found),
        records_in_flight=sum(one.records_in_flight for one in found),
        oldest_seconds=max((one.oldest_seconds for one in found if one.oldest_seconds is not None), default=None),
        attempts=max(one.attempts for one in found),
        why=next((one.why for one in found if one.why), ""),
        kafka=next((one.kafka for one in found if one.kafka), None),
    )
