"""Producing over HTTP: records, transactions, idempotency keys."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="produce",
    parts="headrace.sidecar.produce.produce_parts:ProduceParts",
    endpoints=[
        "headrace.sidecar.produce.routes:ProduceRoute",
        "headrace.sidecar.produce.transaction_routes:TransactionRoute",
    ],
    commands={
        "produce": CliCommand(
            "headrace.cli.produce_command:produce",
            "Write each line as a record, and print how many all in-sync replicas have acknowledged.",
        )
    },
    tags={"Produce": ["/producers", "/transactions"]},
    # A transaction commits the offsets of an active consumer.
    needs=["consumers", "active"],
)
