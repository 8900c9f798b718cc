"""`headrace function`: run a function file, check it, call its handler."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click

from headrace.cli.cluster_options import ClusterSettings, kafka_options, load_settings, registry_options
from headrace.cli.global_options import HeadraceGroup
from headrace.cli.output import collected_warnings, print_check, print_json
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.delivery.outcomes import Delivery
from headrace.errors import FunctionInvalid, InvalidRequest
from headrace.formats.registry import SchemaRegistry
from headrace.functions.destination import FunctionDestination
from headrace.functions.load import load_function
from headrace.functions.spec import FunctionSpec
from headrace.kafka import Admin, TopicDirectory, read_window, window
from headrace.records import OutgoingRecord, Produced, Record, TopicPartition
from headrace.runtime import SystemClock


@click.group(cls=HeadraceGroup)
def function() -> None:
    """Run and check functions, call a handler.

    Example: headrace function run function.yaml --reload
    """


@function.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("function.yaml"))
@click.option("--reload", is_flag=True, help="Replace the workers when a file in the function's folder changes.")
@kafka_options
def run(file: Path, reload: bool, cluster: ClusterSettings, output: str) -> int:
    """Run one function in the foreground as `headrace run` does, without anything else that headrace.yaml names.

    If the handler cannot be called, the exit code is 78. If a changed file fails to load, the old workers continue, and
    the log has the reason.

    Example: headrace function run orders/function.yaml --reload
    """
    from headrace.app.app import run as run_everything

    settings = _settings(cluster)
    with collected_warnings():  # the start logs them
        load_function(file, settings, check_handler=True)
    alone: dict[str, Any] = {"functions": [file], "reactive_consumers": {}, "pipelines": []}
    alone["functions_reload"] = reload or settings.functions_reload
    return run_everything(settings.model_copy(update=alone), announce=click.echo)


@function.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("function.yaml"))
@click.option("--strict", is_flag=True, help="Treat warnings as problems.")
@kafka_options
def validate(file: Path, strict: bool, cluster: ClusterSettings, output: str) -> None:
    """Check a function file and its handler without running it; exit code 78 if there is a problem.

    Every problem is printed with its line. Warnings name keys without effect.

    Example: headrace function validate orders/function.yaml --strict
    """
    spec: FunctionSpec | None = None
    problems: list[str] = []
    with collected_warnings() as warnings:
        try:
            spec = load_function(file, _settings(cluster), check_handler=True)
        except FunctionInvalid as invalid:
            problems = invalid.description.splitlines()
    problems += warnings if strict else ()
    fine = f"{file}: ok ({spec.handler}, triggers: {', '.join(one.name for one in spec.triggers)})" if spec else ""
    print_check(FunctionInvalid, problems, warnings, fine, output)


@function.command("test")
@click.argument("file", type=click.Path(path_type=Path), default=Path("function.yaml"))
@click.option("--record", metavar="TOPIC:PARTITION:OFFSET", help="Use this record of Kafka.")
@click.option("--value", help="Use a record with this text.")
@click.option("--key", help="Key of a record that is not in Kafka.")
@registry_options
async def call_handler(
    file: Path, record: str | None, value: str | None, key: str | None, cluster: ClusterSettings, output: str
) -> int:
    """Call a handler in this process with one record, and print result and outputs; the exit code of a failure is 1.

    Nothing is written and no offset is committed. A breakpoint() in the handler opens the debugger. The settings are
    those of the trigger that reads the record's topic, otherwise of the first trigger.

    Example: headrace function test orders/function.yaml --record orders:0:17
    """
    from headrace.functions.foreground import ForegroundFunction

    spec, clock = load_function(file, _settings(cluster), check_handler=True), SystemClock()
    topic, number, offset = (record or "").rsplit(":", 2) if record and record.count(":") > 1 else ("", "0", "0")
    if record and not (topic and number.isdecimal() and offset.isdecimal()):
        raise InvalidRequest(f"--record {record} is not valid: write TOPIC:PARTITION:OFFSET, such as orders:0:17")
    trigger = next((trigger for trigger in spec.kafka_triggers if topic in trigger.topics), spec.kafka_triggers[0])
    kafka, service = trigger.kafka.cluster(cluster.kafka), ForegroundFunction(spec, [trigger], clock)
    if record:
        read = await _read(kafka, TopicPartition(topic, int(number)), int(offset))
    else:
        data = None if value is None else value.encode()
        read = Record(trigger.topics[0], 0, 0, round(clock.time() * 1000), key.encode() if key else None, data)
    written: list[OutgoingRecord] = []

    async def produce(records: Sequence[OutgoingRecord]) -> list[Produced]:
        written.extend(records)
        return [Produced(0, 0)] * len(records)

    async def partitions_of(topic: str) -> int:
        return len((await Admin(kafka).describe_topic(topic)).partitions) if record else 1

    topics = cast(TopicDirectory, SimpleNamespace(partitions_of=partitions_of))
    registry = SchemaRegistry(cluster.registry, clock)
    destination = FunctionDestination(service, trigger, clock, produce=produce, registry=registry, topics=topics)
    try:
        [reply] = await destination.deliver(Delivery(trigger.group, read.topic_partition, 0, [read], 1))
    finally:
        await registry.close()
    outputs = [_shown(each) for each in written]
    if output == "json":
        end = {"ok": not reply.error, "error": reply.error, "reason": reply.reason, "stack": reply.stack}
        print_json({**end, "outputs": outputs})
    else:
        for shown in outputs:
            click.echo(f"output: {shown['topic']} key={shown['key']} headers={shown['headers']} {shown['value']}")
        why = reply.reason if reply.stack else f"{reply.error}: {reply.reason}"  # the log has the stack
        click.echo(f"failed: {why}" if reply.error else "succeeded")
    return 1 if reply.error else 0


def _settings(cluster: ClusterSettings) -> HeadraceConfig:
    """Return the settings with which `run` starts a function, so that all commands report the same errors."""
    return (cluster.file or load_settings(None)).model_copy(update={"kafka": cluster.kafka})


async def _read(kafka: KafkaConfig, partition: TopicPartition, offset: int) -> Record:
    starts, ends = await window(Admin(kafka), partition.topic, partition.partition, offset)
    async with contextlib.aclosing(read_window(kafka, starts, ends)) as batches:
        first = next(iter(await anext(batches, ())), None)
    if first and first.offset == offset:
        return first
    following = f"the next record has offset {first.offset}" if first else "no later record exists"
    raise InvalidRequest(f"no record has offset {offset} in {partition}: {following}")


def _shown(record: OutgoingRecord) -> dict[str, Any]:
    key, value, *headers = (
        data and data.decode(errors="backslashreplace")
        for data in (record.key, record.value, *(data for _, data in record.headers or ()))
    )
    names = [name for name, _ in record.headers or ()]
    return {"topic": record.topic, "key": key, "value": value, "headers": list(zip(names, headers, strict=True))}
