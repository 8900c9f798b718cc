"""The only door to Kafka: producer, consumer, administration, names, errors, client properties."""

from headrace.kafka.admin import Admin, PartitionInfo, TopicInfo
from headrace.kafka.consumer import Consumer
from headrace.kafka.names import check_group, check_topic
from headrace.kafka.own_topics import OwnTopics
from headrace.kafka.producer import Producer
from headrace.kafka.reader import read_records
from headrace.kafka.topics import TopicDirectory

__all__ = [
    "Admin",
    "Consumer",
    "OwnTopics",
    "PartitionInfo",
    "Producer",
    "TopicDirectory",
    "TopicInfo",
    "check_group",
    "check_topic",
    "read_records",
]
