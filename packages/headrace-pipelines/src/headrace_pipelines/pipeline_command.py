"""`headrace pipeline`: check, plan, show, test and run a pipeline file; see and control pipelines that run."""

import asyncio
import contextlib
import json
import os
import textwrap
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from headrace.cli.api import Api, api_options
from headrace.cli.cluster_options import ClusterSettings, kafka_options
from headrace.cli.global_options import HeadraceGroup, uses, value_of
from headrace.cli.options import MOMENT
from headrace.cli.output import (
    collected_warnings,
    counted,
    install_progress,
    print_check,
    print_json,
    print_result,
    print_rows,
    progress,
)
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.config.whole_file import WholeFile
from headrace.errors import CheckpointUnusable, HeadraceError, InvalidRequest, PipelineInvalid
from headrace.kafka import Admin
from headrace.kafka.timestamps import milliseconds
from headrace.runtime import Deadline, SystemClock, run_blocking
from headrace_pipelines.checkpoints import Frozen, discard, preview
from headrace_pipelines.driver_protocol import DriverTask
from headrace_pipelines.driver_tasks import TaskDriver
from headrace_pipelines.graph import paths_read, resolved_sql
from headrace_pipelines.lineage import as_text, lineage_graph
from headrace_pipelines.load import load_pipeline, load_pipelines
from headrace_pipelines.prepare import prepare as prepare_pipelines
from headrace_pipelines.routes import PipelineEndpoints
from headrace_pipelines.runs import PipelineRun
from headrace_pipelines.spark_project import is_project, load_project, load_projects
from headrace_pipelines.spec import PipelineSpec
from headrace_pipelines.test_cases import differences, load_test_case

_LOOK_SECONDS = 0.1
_DRAIN_SECONDS = 60.0
_COLUMNS = 100
_SHOWN_RECORDS = 1000
"""Newest records of each partition that `show` reads."""
_file = click.argument("file", type=click.Path(path_type=Path))


@click.group(cls=HeadraceGroup)
def pipeline() -> None:
    """Check, plan, show, test and run pipeline files; see and control those that run.

    Example: headrace pipeline validate tolls.yaml
    """


@pipeline.command()
@_file
@kafka_options
def run(file: Path, cluster: ClusterSettings, output: str) -> int:
    """Run one pipeline in the foreground, as `headrace run` does, and nothing else that headrace.yaml names.

    The file may also be the `spark-pipeline.yml` of a project of Spark Declarative Pipelines.

    With `trigger.once` it ends when all present records are read, and a terminal shows a progress bar. Otherwise
    SIGTERM or Ctrl-C lets each flow finish its micro-batch.

    Example: headrace pipeline run tolls.yaml
    """
    from headrace.app.app import run as run_everything

    settings, of_spark = cluster.file or WholeFile(), is_project(file)
    if not of_spark and (spec := load_pipeline(file)).trigger.once:
        return asyncio.run(_run_once(spec, cluster, settings, output))
    alone: dict[str, Any] = {"kafka": cluster.kafka, "reactive_consumers": {}, "functions": []}
    alone |= {"pipelines": [] if of_spark else [file], "spark_pipelines": [file] if of_spark else []}
    return run_everything(settings.model_copy(update=alone), announce=click.echo)


async def _run_once(spec: PipelineSpec, cluster: ClusterSettings, settings: HeadraceConfig, output: str) -> int:
    kafka, clock, state = spec.cluster(cluster.kafka), SystemClock(), settings.state_dir / "pipelines"
    one = PipelineRun(spec, kafka, state, clock, Admin(kafka), cluster.registry)
    await one.start()
    try:
        with progress(spec.name) as show:
            while (status := one.status())["state"] not in ("finished", "failed"):
                done, left = (
                    sum(flow[field] or 0 for flow in status["flows"].values())
                    for field in ("input_records", "lag_records")
                )
                show(done, done + left)
                await clock.sleep(_LOOK_SECONDS)
    finally:
        await one.drain(Deadline(clock, _DRAIN_SECONDS))
        await one.stop()
    if status["state"] == "failed":
        raise PipelineInvalid(status["reason"])
    print_result(status, f"{spec.name}: finished", output)
    return 0


@pipeline.command()
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--sql", is_flag=True, help="Print the SQL of each flow instead, with the views that it reads in it.")
@uses("output")
def validate(files: Sequence[Path], sql: bool, output: str) -> None:
    """Check pipeline files: settings, SQL, columns and types; never starts Spark. Exit code 78 if there is a problem.

    `headrace pipeline plan` finds what only Spark can find.

    Example: headrace pipeline validate tolls.yaml
    """
    if sql:
        specs = load_pipelines(files, check=True)
        prefixes = [f"{spec.name}." if len(specs) > 1 else "" for spec in specs]
        found = {
            f"{prefix}{flow}": resolved_sql(spec, flow)
            for prefix, spec in zip(prefixes, specs, strict=True)
            for flow in spec.flows
        }
        print_result(found, "\n\n".join(f"-- flow {flow}\n{text};" for flow, text in found.items()), output)
        return
    problems: list[str] = []
    with collected_warnings() as warnings:
        projects = [file for file in files if is_project(file)]
        try:
            load_pipelines([file for file in files if file not in projects], check=True)
        except PipelineInvalid as invalid:
            problems = invalid.description.splitlines()
        try:
            load_projects(projects)
        except PipelineInvalid as invalid:
            problems += invalid.description.splitlines()
    fine = "\n".join(f"{file}: ok" for file in files)
    print_check(PipelineInvalid, problems, warnings, fine, output)


@pipeline.command()
@_file
@click.option("--graph", type=click.Path(path_type=Path), help="Draw the lineage graph into this file: .svg or .html.")
@kafka_options
async def plan(file: Path, graph: Path | None, cluster: ClusterSettings, output: str) -> None:
    """Let Spark resolve a pipeline without running it, and print graph, columns, guarantees and kept state.

    Each flow is compared with its checkpoint in the `state_dir` of headrace.yaml. What Spark or a checkpoint would
    refuse later is refused now, with exit code 78. Of a project of Spark Declarative Pipelines it is Spark's dry run.

    Example: headrace pipeline plan tolls.yaml --graph tolls.svg
    """
    if is_project(file):
        await _dry_run(file, cluster, output)
        return
    spec = load_pipeline(file, check=True)
    if graph:
        graph.write_text(lineage_graph(spec, page=graph.suffix == ".html"))
    async with TaskDriver.opened(debug=value_of("debug")) as driver:
        found = await driver.run_task(
            file, spec, spec.cluster(cluster.kafka), DriverTask(kind="describe"), cluster.registry
        )
        problems = [driver.sentence(file, problem) for problem in found["problems"]]
    checkpoints: dict[str, str] = {}
    for name, frozen in found.get("frozen", {}).items():
        known = None if spec.driver.remote else msgspec.convert(frozen, Frozen | None)
        checkpoints[name], why = preview(_state_folder(spec, cluster.file), name, known)
        if why:
            problem = {"part": f"flows.{name}", "text": f"{CheckpointUnusable.message}: {why}", "stack": ""}
            problems.append(driver.sentence(file, problem))
    sinks = {name: {"mode": flow.sink.mode, "guarantee": flow.sink.guarantee} for name, flow in spec.flows.items()}
    result = {"ok": not problems, "parts": found["parts"], "sinks": sinks, "checkpoints": checkpoints}
    print_result({**result, "problems": problems}, as_text(spec, found["parts"], checkpoints), output)
    if problems:
        raise PipelineInvalid("\n".join(problems))


async def _dry_run(file: Path, cluster: ClusterSettings, output: str) -> None:
    project = load_project(file)
    async with TaskDriver.opened(debug=value_of("debug")) as driver:
        task = DriverTask(kind="describe")
        found = await driver.run_task(file, project, project.cluster(cluster.kafka), task, cluster.registry)
    print_result({"ok": True, **found}, "\n".join(found["texts"]), output)


@pipeline.command()
@_file
@click.argument("name")
@click.option("--limit", type=click.IntRange(1), default=10, show_default=True, help="Rows at most.")
@click.option("--from", "start", type=MOMENT, help="Read from this time on: 2026-01-31T08:00, or 2h (ago).")
@click.option("--watch", is_flag=True, help="Show the rows again whenever the file, or a .sql or .py by it, changes.")
@kafka_options
async def show(
    file: Path, name: str, limit: int, start: datetime | None, watch: bool, cluster: ClusterSettings, output: str
) -> None:
    """Print rows of a source, view or flow, from a slice of its topics. Writes nothing.

    The slice is the newest 1,000 records of each partition, or with --from all since a time.

    Example: headrace pipeline show tolls.yaml heavy --limit 5 --watch
    """
    async with TaskDriver.opened(debug=value_of("debug")) as driver:
        async for _ in _changes(file, watch=watch):
            began = time.monotonic()
            try:
                spec = load_pipeline(file, check=True)
                known = [*spec.sources, *spec.views, *spec.flows]
                kafka = spec.cluster(cluster.kafka)
                slices = await slices_of(spec, _known(name, known), kafka, start)
                task = DriverTask(kind="show", name=name, limit=limit, slices=slices)
                rows = (await driver.run_task(file, spec, kafka, task, cluster.registry))["rows"]
            except HeadraceError as problem:
                if not watch:
                    raise
                click.echo(problem.description, err=True)
                continue
            print_rows(rows, output, "no rows in this slice")
            if watch:
                click.echo(
                    f"{counted(len(rows), 'row')} in {time.monotonic() - began:.1f} s; waiting for a change", err=True
                )


async def slices_of(spec: PipelineSpec, name: str, kafka: KafkaConfig, start: datetime | None) -> dict[str, Any]:
    """Return for each topic of a part where reading begins and ends."""
    admin = Admin(kafka)
    slices: dict[str, Any] = {}
    read = [spec.sources[each].topics for kind, each in paths_read(spec, [name]) if kind == "sources"]
    for topic in {topic for topics in read for topic in topics}:
        offsets = await admin.topic_offsets(topic, "Read")
        since = await admin.offsets_since(offsets, milliseconds(start)) if start else None
        firsts = {at: max(first, end - _SHOWN_RECORDS) for at, (first, end) in offsets.items()}
        if since is not None:  # a partition without records since then is left out of the response
            firsts = {at: min(since.get(at, end), end) for at, (_, end) in offsets.items()}
        slices[topic] = {at.partition: (firsts[at], end) for at, (_, end) in offsets.items()}
    return slices


async def _changes(file: Path, *, watch: bool) -> AsyncIterator[None]:
    """Yield now, and with `watch` whenever the file, or a .sql or .py file in or below its folder, has changed."""
    before: object = None
    while watch or before is None:
        began = time.monotonic()
        if (now := await run_blocking(_written, file)) != before:
            before = now
            yield
        await asyncio.sleep(max(_LOOK_SECONDS, time.monotonic() - began))


def _written(file: Path) -> dict[Path, int]:
    """Return the time of each file that a pipeline may use, without those in hidden folders, such as `.venv`."""
    paths = [file]
    found: dict[Path, int] = {}
    for folder, below, names in os.walk(file.parent):
        below[:] = [name for name in below if not name.startswith(".")]
        paths += [Path(folder, name) for name in names if name.endswith((".sql", ".py"))]
    for path in paths:
        with contextlib.suppress(OSError):  # an editor has just replaced it
            found[path] = path.stat().st_mtime_ns
    return found


@pipeline.command()
@_file
@uses("output")
def test(file: Path, output: str) -> int:
    """Run the tests of a pipeline: given rows in, expected rows out; needs no Kafka. Exit code 1 if one fails.

    A test case is a file `tests/*.yaml` by it with `given` and `expect`.

    Example: headrace pipeline test tolls.yaml
    """
    return asyncio.run(_test(file, file.parent / "tests", output))


async def _test(file: Path, folder: Path, output: str) -> int:
    spec = load_pipeline(file, check=True)
    found = {each: load_test_case(each) for each in sorted(folder.glob("*.yaml"))}
    cases = {each: case for each, case in found.items() if case.pipeline in (None, file.name)}
    if not cases:
        raise PipelineInvalid(f"{folder}: has no tests of {file.name}: write tests/NAME.yaml with given and expect")
    results: list[dict[str, Any]] = []
    async with TaskDriver.opened(debug=value_of("debug")) as driver:
        for each, case in cases.items():
            for name in case.expect:
                _known(name, [*spec.flows, *spec.views])
            compared = await driver.run_task(file, spec, KafkaConfig(), case.task(each.parent))
            for name, rows in compared.items():
                differing = differences(rows["actual"], rows["expected"], ordered=case.ordered)
                results.append({"test": each.stem, "name": name, "ok": not differing, "difference": differing})
    lines: list[str] = []
    for one in results:
        lines += [f"{'ok    ' if one['ok'] else 'FAILED'} {one['test']}: {one['name']}"]
        lines += [f"    {line}" for line in one["difference"]]
    print_result(results, "\n".join(lines), output)
    return int(not all(one["ok"] for one in results))


def _known(name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise click.UsageError(f"{name} is not in the pipeline: there are {', '.join(known)}")
    return name


@pipeline.command()
@click.argument("name", required=False)
@api_options
def status(name: str | None, api: Api, output: str) -> None:
    """Show the pipelines of a running Headrace: each flow's progress, lag, state and watermark, and why it stalls.

    Example: headrace pipeline status tolls
    """
    found = [api.call(PipelineEndpoints.show, name=name)] if name else api.call(PipelineEndpoints.list)["pipelines"]
    _print(found, output)


def _change(word: str, text: str) -> None:
    @pipeline.command(word, help=f"{text}\n\nExample: headrace pipeline {word} tolls")
    @click.argument("name")
    @api_options
    def command(name: str, api: Api, output: str) -> None:
        _print([api.call(PipelineEndpoints.change, name=name, action=word)], output)


_change("pause", "Pause a pipeline after its micro-batches, also over restarts.")
_change("resume", "Start a pipeline again that is paused, stopped, failed or finished.")


@pipeline.command()
def prepare() -> None:
    """Fetch Spark's Kafka connector, and store what Spark's JVM loads, so that drivers start in half the time.

    It takes about a minute and 200 MB, once for each installation. Run it when an image is built.

    Example: headrace pipeline prepare
    """
    with install_progress() as progress:
        prepare_pipelines(progress)
    click.echo("ready")


@pipeline.command()
@_file
@click.argument("flow")
@click.option("--limit", type=click.IntRange(0), default=10, show_default=True, help="Rows of each store at most.")
@click.option("--discard", "discards", is_flag=True, help="Delete the checkpoint with the state, instead.")
@click.option("--yes", is_flag=True, help="Do not ask before --discard.")
@kafka_options
async def state(
    file: Path, flow: str, limit: int, discards: bool, yes: bool, cluster: ClusterSettings, output: str
) -> None:
    """Show what a flow keeps between micro-batches: its stores, their number of rows, and some rows with their keys.

    It reads the checkpoint and changes nothing; the pipeline may run meanwhile.

    With --discard the flow begins at `starting` again. That is refused while a driver uses the checkpoint: pause the
    pipeline first.

    Example: headrace pipeline state tolls.yaml by_gate
    """
    spec, folder, checkpoint = _checkpoint_of(file, flow, cluster.file)
    if discards:
        _discard(flow, folder, output, yes=yes)
        return
    async with TaskDriver.opened() as driver:
        task = DriverTask(kind="state", checkpoint=checkpoint, limit=limit)
        stores = (await driver.run_task(file, spec, KafkaConfig(), task))["stores"]
    if output == "json":
        print_json(stores)
        return
    print_rows([{name: each[name] for name in each if name != "shown"} for each in stores], output, "no state")
    for row in (row for store in stores for row in store["shown"]):
        click.echo(f"{json.dumps(row['key'])} {json.dumps(row['value'])}")


def _checkpoint_of(file: Path, flow: str, settings: HeadraceConfig | None) -> tuple[PipelineSpec, Path, Path]:
    """Return the pipeline of a file, its folder, and the folder of a flow's checkpoint."""
    spec = load_pipeline(file)
    if flow not in spec.running:
        raise InvalidRequest(f"{file} has no flow {flow}: there are {', '.join(spec.running)}")
    folder = _state_folder(spec, settings)
    checkpoint = folder / "checkpoints" / flow
    if not checkpoint.exists() and not (folder / "plans" / f"{flow}.json").exists():
        raise InvalidRequest(f"{folder} has no checkpoint of flow {flow}: -c names the file with another state_dir")
    return spec, folder, checkpoint


def _state_folder(spec: PipelineSpec, settings: HeadraceConfig | None) -> Path:
    return ((settings or WholeFile()).state_dir / "pipelines" / spec.name).absolute()


def _discard(flow: str, folder: Path, output: str, *, yes: bool) -> None:
    prompt = f"Flow {flow} will begin without its checkpoint and state in {folder}. Its rows may come again. Discard?"
    if yes or click.confirm(prompt, abort=True, err=output == "json"):
        discard(folder, flow)
        text = f"flow {flow} will begin as a new flow at its next start"
        print_result({"flow": flow, "discarded": True}, text, output)


def _print(found: list[Mapping[str, Any]], output: str) -> None:
    if output == "json":
        print_json(found)
        return
    fields = {"records": "inputRecords", "per_second": "recordsPerSecond", "lag": "lagRecords"}
    fields |= {"state_rows": "stateRows", "watermark": "watermark"}
    rows = [
        {
            "flow": f"{one['name']}.{name}",
            "state": flow["state"],
            "batch": _batch(flow),
            **{title: "-" if flow[field] is None else flow[field] for title, field in fields.items()},
        }
        for one in found
        for name, flow in one["flows"].items()
    ]
    print_rows(rows, output, "no pipelines here")
    for one in found:
        if one["reason"]:
            click.echo(textwrap.fill(f"{one['name']}: {one['reason']}", _COLUMNS, subsequent_indent="  "))


def _batch(flow: Mapping[str, Any]) -> str:
    """Return the number of a flow's last micro-batch, or how long its first one has been running."""
    if flow["batchId"] >= 0:
        return str(flow["batchId"])
    seconds = flow["firstBatchSeconds"]
    return "-" if seconds is None else f"first batch for {seconds:.0f} s"
