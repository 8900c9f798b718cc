"""The process with the definitions of a project: registers them with the driver's JVM, and starts a run per request.

It is a client of Spark Connect, because the definitions need functions of such a client, and the driver itself is none.
Requests are words on standard input: `run` and `dry`. Responses are JSON lines on the standard output that it started
with: texts of Spark, and an end for each run. Each run reads the definitions again, in a session of its own, as Spark's
own command does; so the server keeps nothing of earlier runs.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pyspark.pipelines import cli
from pyspark.pipelines.spark_connect_graph_element_registry import SparkConnectGraphElementRegistry
from pyspark.pipelines.spark_connect_pipeline import create_dataflow_graph, start_run
from pyspark.sql import SparkSession

from headrace_pipelines.driver.failures import failure_event
from headrace_pipelines.driver.run_events import ProjectFile, RunEnded, SparkText


def main() -> None:
    """Answer the requests on standard input, until its end."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    project = msgspec.json.decode(sys.stdin.readline(), type=ProjectFile)
    encoder = msgspec.json.Encoder()
    for request in sys.stdin:
        ended = RunEnded()
        try:
            for text in _texts(project, dry=request.strip() == "dry"):
                stream.write(encoder.encode(SparkText(text)) + b"\n")
        except Exception as cause:  # noqa: BLE001 boundary: the driver reports it
            ended = RunEnded(failure_event(cause, ""))
        stream.write(encoder.encode(ended) + b"\n")


def _texts(project: ProjectFile, *, dry: bool) -> Iterator[str]:
    """Make one run, and yield what Spark says of it."""
    spec = cli.unpack_pipeline_spec(project.document)
    builder = SparkSession.builder.config("spark.sql.connect.serverStacktrace.enabled", "false")
    for name, value in spec.configuration.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        graph = create_dataflow_graph(spark, spec.catalog, spec.database, spec.configuration)
        registry = SparkConnectGraphElementRegistry(spark, graph)
        cli.register_definitions(Path(project.file), registry, spec, spark, graph)
        for response in start_run(spark, graph, [], full_refresh_all=False, refresh=[], dry=dry, storage=spec.storage):
            if "pipeline_event_result" in response:
                yield response["pipeline_event_result"].event.message
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
