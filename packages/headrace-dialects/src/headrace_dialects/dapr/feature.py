"""The endpoints to which an application of Dapr publishes."""

from headrace.feature import Feature

FEATURE = Feature(
    name="dapr",
    section="headrace_dialects.dapr.dapr_sections:DaprSections",
    parts="headrace_dialects.dapr.dapr_parts:DaprParts",
    endpoints=["headrace_dialects.dapr.publish_routes:PublishRoute"],
    tags={"Produce": ["/v1.0/publish", "/v1.0-alpha1/publish"]},
    parameters={"pubsub": "One of `dapr.pubsubs`."},
    needs=["produce"],
)
