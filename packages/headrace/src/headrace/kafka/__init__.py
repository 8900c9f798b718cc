"""The only package that uses the Kafka client: producers, consumers, administration, tables, errors, properties."""

from headrace.kafka.admin import Admin
from headrace.kafka.client.properties import librdkafka_version
from headrace.kafka.client.reachability import Reachability
from headrace.kafka.cluster_info import PartitionInfo, TopicInfo
from headrace.kafka.compacted_table import JSON_OBJECTS, RAW_BYTES, CompactedTable, read_back
from headrace.kafka.consumer import Consumer, MissingPartitions, Subscription, hanging_consumers
from headrace.kafka.lease import Lease, lease_holder
from headrace.kafka.member_reader import MemberReader
from headrace.kafka.names import check_group, check_topic
from headrace.kafka.positions import ReadPolicy
from headrace.kafka.producer import Producer
from headrace.kafka.reader import ReadPart, read_batches, read_columns, read_records, read_slice, read_window, window
from headrace.kafka.topic_directory import InternalTopic, TopicCreator, TopicDirectory
from headrace.kafka.transactions.producers import GroupTransactions, TransactionalProducers, TransactionSession
from headrace.kafka.transactions.transaction_job import GroupOffsets
