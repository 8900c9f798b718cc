"""Health: liveness, readiness, metrics, and the preconditions of durability."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="health",
    parts="headrace.admin.health.health_parts:HealthParts",
    endpoints=["headrace.admin.health.routes:HealthEndpoints"],
    commands={
        "status": CliCommand(
            "headrace.cli.status:status",
            "Show one page: Kafka, services, consumers, functions, pipelines, tables, dead letters left, active "
            "instances.",
        ),
        "ready": CliCommand("headrace.cli.configuration:ready", "Wait until a Headrace is ready."),
        "doctor": CliCommand(
            "headrace.cli.doctor:doctor", "Check the preconditions of durability, and print what to do."
        ),
        "reconcile": CliCommand(
            "headrace.cli.reconcile:reconcile",
            "Prove that each record of a window was delivered, dead-lettered, skipped, or is waiting.",
        ),
        "generate": CliCommand(
            "headrace.cli.generate:generate",
            "Print a Grafana dashboard (JSON), alert rules for Prometheus (YAML), or the completion of a SHELL.",
        ),
    },
    tags={"Health and metrics": ["/health", "/live", "/ready", "/metrics"]},
    parameters={"serviceId": "`audit.service_id`."},
    needs=["consumers"],
)
