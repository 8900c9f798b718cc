"""The only door to Kafka: producer, consumer, administration, names, errors, client properties."""

from headrace.kafka.admin import Admin, PartitionInfo, TopicInfo
from headrace.kafka.batch_limits import BatchLimits
from headrace.kafka.bulk_producer import BulkProducer
from headrace.kafka.consumer import Consumer
from headrace.kafka.control_table import ControlTable
from headrace.kafka.followed_topic import FollowedTopic
from headrace.kafka.lease import Lease, lease_holder
from headrace.kafka.names import check_group, check_topic
from headrace.kafka.own_topics import OwnTopics, ensure_table
from headrace.kafka.positions import ReadPolicy
from headrace.kafka.producer import Producer
from headrace.kafka.reachability import Reachability
from headrace.kafka.reader import read_records
from headrace.kafka.state_topic import StateTopic
from headrace.kafka.subscription import Subscription
from headrace.kafka.topics import TopicDirectory
from headrace.kafka.transaction_session import TransactionSession
from headrace.kafka.transactions import TransactionalProducers

__all__ = [
    "Admin",
    "BatchLimits",
    "BulkProducer",
    "Consumer",
    "ControlTable",
    "FollowedTopic",
    "Lease",
    "OwnTopics",
    "PartitionInfo",
    "Producer",
    "Reachability",
    "ReadPolicy",
    "StateTopic",
    "Subscription",
    "TopicDirectory",
    "TopicInfo",
    "TransactionSession",
    "TransactionalProducers",
    "check_group",
    "check_topic",
    "ensure_table",
    "lease_holder",
    "read_records",
]
