"""Kafka administration: topics, groups and their offsets, brokers, access rules; and what the schema registry has."""
