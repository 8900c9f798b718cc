"""Pipelines: SQL and Python over Kafka topics, run by Spark in a driver process of their own.

This file exports nothing on purpose: the driver process imports `spec` and `graph` through it, and meets nothing
of the process that watches it.
"""
