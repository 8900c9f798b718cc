"""The endpoints that only the light-4j sidecar has, for clients that come from it."""

from headrace.feature import Feature

FEATURE = Feature(
    name="light4j",
    section="headrace_dialects.light4j.light_sections:LightSections",
    parts="headrace_dialects.light4j.light_parts:LightParts",
    endpoints=[
        "headrace_dialects.light4j.audit_routes:AuditEndpoints",
        "headrace_dialects.light4j.dead_letter_routes:ActiveDeadLetterEndpoints",
        "headrace_dialects.light4j.redelivery_routes:RedeliveryEndpoints",
        "headrace_dialects.light4j.metadata_routes:MetadataEndpoints",
        "headrace_dialects.light4j.chaos_routes:ChaosEndpoints",
    ],
    tags={
        "Audit": ["/consumers/active/audit"],
        "Dead letters": ["/consumers/deadLetter"],
        "Jobs and replays": ["/adm/messagereplaymetadata"],
        "Administration": ["/adm/chaosmonkey"],
    },
    parameters={"assault": "`latency`, `exception`, `memory` or `kill`."},
    needs=["consumers", "commands", "active", "runs", "process"],
)
