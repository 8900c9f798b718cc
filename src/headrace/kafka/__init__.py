"""The only door to Kafka: producer, consumer, administration, names, errors, client properties."""

from headrace.kafka.admin import Admin, PartitionInfo, TopicInfo
from headrace.kafka.batch_limits import BatchLimits
from headrace.kafka.compacted_table import JSON_OBJECTS, RAW_BYTES, CompactedTable, read_back
from headrace.kafka.consumer import Consumer
from headrace.kafka.lease import Lease, lease_holder
from headrace.kafka.names import check_group, check_topic
from headrace.kafka.positions import ReadPolicy
from headrace.kafka.producer import Producer
from headrace.kafka.reachability import Reachability
from headrace.kafka.reader import read_records
from headrace.kafka.subscription import Subscription
from headrace.kafka.topics import InternalTopic, OwnTopics, TopicDirectory
from headrace.kafka.transaction_session import TransactionSession
from headrace.kafka.transactions import TransactionalProducers

__all__ = [
    "JSON_OBJECTS",
    "RAW_BYTES",
    "Admin",
    "BatchLimits",
    "CompactedTable",
    "Consumer",
    "InternalTopic",
    "Lease",
    "OwnTopics",
    "PartitionInfo",
    "Producer",
    "Reachability",
    "ReadPolicy",
    "Subscription",
    "TopicDirectory",
    "TopicInfo",
    "TransactionSession",
    "TransactionalProducers",
    "check_group",
    "check_topic",
    "lease_holder",
    "read_back",
    "read_records",
]
