"""`headrace function`: run a function file, and check it."""

from pathlib import Path
from typing import Any

import click

from headrace.cli.connection import ClusterSettings, kafka_options
from headrace.cli.output import collected_warnings, print_json
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.errors import FunctionInvalid, HeadraceError
from headrace.functions.check import advice
from headrace.functions.load import load_function
from headrace.functions.spec import FunctionSpec, KafkaTrigger
from headrace.kafka import Admin

_ASK_SECONDS = 3.0


@click.group()
def function() -> None:
    """Run and check functions.

    Example: headrace function run function.yaml --reload
    """


@function.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("function.yaml"))
@click.option("--reload", is_flag=True, help="Replace the workers when a file in the function's folder changes.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of health and metrics; by default that of the file.")
@kafka_options
def run(file: Path, reload: bool, port: int | None, cluster: ClusterSettings, output: str) -> int:
    """Run one function in the foreground, as `headrace run` does, and nothing else that headrace.yaml names.

    A handler that cannot be called ends it with code 78. A change that does not load keeps the old workers, and the
    log has the reason.

    Example: headrace function run orders/function.yaml --reload
    """
    from headrace.app import run as run_everything

    with collected_warnings():  # the start logs them
        load_function(file, cluster.file, check_handler=True)
    settings = cluster.file or HeadraceConfig()
    alone: dict[str, Any] = {"kafka": cluster.kafka, "functions": [file], "reactive_consumers": {}, "pipelines": []}
    alone |= {"watched_functions": [], "functions_reload": reload or settings.functions_reload}
    if port:
        alone["http"] = settings.http.model_copy(update={"port": port})
    return run_everything(settings.model_copy(update=alone), announce=click.echo)


@function.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("function.yaml"))
@click.option("--strict", is_flag=True, help="A warning is a problem too.")
@click.option(
    "--partitions",
    type=click.IntRange(1),
    help="Partitions of all topics of a trigger; by default those that Kafka has.",
)
@kafka_options
async def validate(file: Path, strict: bool, partitions: int | None, cluster: ClusterSettings, output: str) -> None:
    """Check a function file and its handler, without running it; exit code 78 if there is a problem.

    Every problem has its line. Warnings name what has no effect. Advice is on the numbers of workers and replicas.

    Example: headrace function validate orders/function.yaml --strict
    """
    spec: FunctionSpec | None = None
    problems, found = list[str](), list[str]()
    with collected_warnings() as warnings:
        try:
            spec = load_function(file, cluster.file, check_handler=True)
        except FunctionInvalid as invalid:
            problems = invalid.description.splitlines()
    if spec:
        for trigger in spec.triggers:
            found += [f"{trigger.name}: {text}" for text in await _advice(spec, trigger, cluster.kafka, partitions)]
    problems += warnings if strict else ()
    if output == "json":
        print_json({"ok": not problems, "problems": problems, "warnings": warnings, "advice": found})
    else:
        marked = {"warning": () if strict else warnings, "advice": found}
        click.echo("".join(f"{mark}: {text}\n" for mark, texts in marked.items() for text in texts), err=True, nl=False)
    if problems or not spec:
        raise FunctionInvalid("\n".join(problems))
    if output == "text":
        click.echo(f"{file}: ok ({spec.handler}, triggers: {', '.join(one.name for one in spec.triggers)})")


async def _advice(spec: FunctionSpec, trigger: KafkaTrigger, kafka: KafkaConfig, partitions: int | None) -> list[str]:
    if partitions:
        return advice(spec, trigger, partitions)
    at = trigger.kafka.cluster(kafka).model_copy(update={"request_timeout_seconds": _ASK_SECONDS})
    try:
        topics = [await Admin(at).describe_topic(topic) for topic in trigger.topics]
    except HeadraceError as cause:
        unknown = f"workers and replicas are not compared with partitions ({cause.description}): give --partitions"
        return [*advice(spec, trigger, 0), unknown]
    return advice(spec, trigger, sum(len(topic.partitions) for topic in topics))
