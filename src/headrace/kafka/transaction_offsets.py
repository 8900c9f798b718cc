"""The offsets of a consumer group in a transaction: Kafka commits them with the records, or not at all.

Source: KIP-447.
"""

import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import confluent_kafka

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.kafka.access import Right
from headrace.kafka.error_map import to_error
from headrace.kafka.positions import to_client
from headrace.records import CommitOffsets, Epochs

_SECONDS: Final = 10.0
_FRAME: Final = b"CGMDv2:"
"""Before the generation, in a member's metadata as the client writes it."""
_MEMBER_GONE: Final = {
    confluent_kafka.KafkaError.UNKNOWN_MEMBER_ID,
    confluent_kafka.KafkaError.FENCED_INSTANCE_ID,
    confluent_kafka.KafkaError.FENCED_MEMBER_EPOCH,
}
_GENERATION_OVER: Final = {
    confluent_kafka.KafkaError.ILLEGAL_GENERATION,
    confluent_kafka.KafkaError.REBALANCE_IN_PROGRESS,
    confluent_kafka.KafkaError.STALE_MEMBER_EPOCH,
}


def metadata_in(member: tuple[bytes, Epochs], epochs: Epochs) -> Any:
    """Return the metadata of a member with these partitions in these epochs, or None if it did not have them.

    Without a generation there is none either, because Kafka then accepts offsets of any member.
    """
    metadata, assigned = member
    generation = int.from_bytes(metadata[len(_FRAME) :][:4], sys.byteorder, signed=True)
    current = all(assigned.get(partition) == epoch for partition, epoch in epochs.items())
    return metadata if current and metadata.startswith(_FRAME) and generation >= 0 else None


class GroupOffsets(NamedTuple):
    """Offsets that a transaction commits for a consumer group."""

    offsets: CommitOffsets
    member: Callable[[], Any]
    """Returns the client's object for the member and its generation, or None if it does not have the partitions any
    more. Called on the producer's thread. Kafka refuses the offsets after another generation began."""

    kafka: KafkaConfig = KafkaConfig()
    """How its client is set."""
    group: str = ""

    def send(self, client: confluent_kafka.Producer) -> errors.HeadraceError | None:
        """Add the offsets to the transaction of a client, on its thread; return why Kafka refuses them."""
        if not (member := self.member()):
            return errors.CommitRefused(f"{', '.join(map(str, self.offsets))}: assigned to this member no more")
        try:
            client.send_offsets_to_transaction(to_client(self.offsets), member, _SECONDS)
        except confluent_kafka.KafkaException as cause:
            return self._error_of(cause, f"commit {', '.join(map(str, self.offsets))} in a transaction")
        return None

    def _error_of(self, cause: confluent_kafka.KafkaException, doing: str) -> errors.HeadraceError:
        """Return our error for offsets that a transaction could not commit.

        A member of an earlier generation may still have its partitions: its consumer knows when it is repeated.
        """
        code = cause.args[0].code()
        if code in _MEMBER_GONE:
            return errors.CommitRefused(
                f"{doing}: the instance is no longer a member of its group, so nothing was written"
            )
        if code in _GENERATION_OVER:
            return errors.TransactionAborted(f"{doing}: the group is rebalancing, nothing was written: send it again")
        topics = {partition.topic for partition in self.offsets}
        return to_error(
            cause, doing, self.kafka, Right("Read", "group", self.group), *(Right("Read", "topic", t) for t in topics)
        )
