"""Pipelines: SQL and Python on Spark, from topics to topics, files and servers."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="pipelines",
    section="headrace_pipelines.pipeline_sections:PipelineSections",
    parts="headrace_pipelines.pipeline_parts:PipelineParts",
    endpoints=["headrace_pipelines.routes:PipelineEndpoints"],
    commands={
        "pipeline": CliCommand(
            "headrace_pipelines.pipeline_command:pipeline",
            "Check, plan, show, test and run pipeline files; see and control those that run.",
        )
    },
    tags={"Pipelines": ["/adm/pipelines"]},
    parameters={"action": "`pause`, `resume` or `stop`."},
    checks="headrace_pipelines.pipeline_checks:PipelineChecks",
    needs=["consumers", "commands", "functions"],
    # A driver finishes its micro-batches before a slow backend uses up the time of the drain.
    before=["runs"],
)
