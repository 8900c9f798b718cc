"""Headrace carries Kafka to people's code."""
