"""Pipelines: SQL and Python over Kafka topics, run by Spark in a separate driver process.

This file exports nothing on purpose: the driver process imports `spec` and `graph` through it, and must not load the
code of the process that watches it.
"""
