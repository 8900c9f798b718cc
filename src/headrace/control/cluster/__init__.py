"""Kafka administration: topics, their configurations, groups and their offsets, brokers and access rules."""
