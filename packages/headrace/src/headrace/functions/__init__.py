"""The function runtime: Nuclio's `handler(context, event)` for Kafka records, run in worker processes.

This file exports nothing on purpose: workers import `sdk` and `protocol` through it, and must start fast.
"""
