"""Topics, groups, brokers and schemas over HTTP."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="cluster",
    parts="headrace.admin.cluster.cluster_parts:ClusterParts",
    endpoints=[
        "headrace.admin.cluster.routes:ClusterEndpoints",
        "headrace.admin.cluster.schema_routes:SchemaEndpoints",
    ],
    commands={
        "topics": CliCommand("headrace.cli.topics:topics", "List, describe, create, alter and delete topics."),
        "groups": CliCommand(
            "headrace.cli.groups:groups", "List consumer groups; show their lag and members; reset their offsets."
        ),
    },
    tags={"Groups and cluster": ["/groups", "/cluster"], "Schemas": ["/schemas"]},
    needs=["consumers"],
)
