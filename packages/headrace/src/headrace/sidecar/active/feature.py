"""Active consumers: clients create instances over HTTP and read from them; and reading of topics without a group."""

from headrace.feature import CliCommand, Feature

_INSTANCE = "/consumers/{group}/instances/{instance}"

FEATURE = Feature(
    name="active",
    parts="headrace.sidecar.active.active_parts:ActiveParts",
    endpoints=[
        "headrace.sidecar.active.routes:ActiveEndpoints",
        "headrace.sidecar.active.status_routes:ActiveStatusEndpoints",
        "headrace.sidecar.active.topic_routes:TopicEndpoints",
    ],
    commands={
        "consume": CliCommand(
            "headrace.cli.consume_command:consume",
            "Print the records of topics, one per line; with --output json as objects with metadata.",
        )
    },
    tags={
        "Active consumers": ["/consumers"],
        "Positions and commits": [f"{_INSTANCE}/offsets", f"{_INSTANCE}/positions"],
        "Topics": ["/topics"],
    },
    parameters={"partition": "Number of the partition."},
    # Its members leave their groups before a slow backend uses up the time of the drain.
    needs=["consumers", "commands", "registrations"],
)
