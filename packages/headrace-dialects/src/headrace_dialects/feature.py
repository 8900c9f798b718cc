"""The endpoints that only the light-4j sidecar has, for clients that come from it."""

from headrace.feature import Feature

FEATURE = Feature(
    name="light4j",
    parts="headrace_dialects.light4j.light_parts:LightParts",
    endpoints=[
        "headrace_dialects.light4j.audit_routes:AuditEndpoints",
        "headrace_dialects.light4j.dead_letter_routes:ActiveDeadLetterEndpoints",
        "headrace_dialects.light4j.redelivery_routes:RedeliveryEndpoints",
        "headrace_dialects.light4j.metadata_routes:MetadataEndpoints",
    ],
    tags={
        "Audit": ["/consumers/active/audit"],
        "Dead letters": ["/consumers/deadLetter"],
        "Jobs and replays": ["/adm/messagereplaymetadata"],
    },
    needs=["consumers", "commands", "active", "runs"],
)
