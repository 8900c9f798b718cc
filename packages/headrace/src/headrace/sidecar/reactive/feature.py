"""Reactive consumers: records of topics are pushed to an HTTP backend."""

from headrace.feature import Feature

FEATURE = Feature(
    name="reactive",
    parts="headrace.sidecar.reactive.reactive_parts:ReactiveParts",
    topics="headrace.sidecar.reactive.reactive_parts:required_topics",
    needs=["consumers", "commands"],
)
