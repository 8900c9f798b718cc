"""Commands on pipelines that run, and on their checkpoints; `headrace pipeline` has them."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from headrace.cli.api import Api, api_options
from headrace.cli.connection import ClusterSettings, config_option, find_settings, kafka_options
from headrace.cli.output import install_progress, print_json, print_rows
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.errors import InvalidRequest
from headrace.pipelines.checkpoints import discard
from headrace.pipelines.load import load_pipeline
from headrace.pipelines.spec import PipelineSpec
from headrace.web.endpoint import Endpoint
from headrace.web.routes.pipelines import PipelineEndpoints

_COLUMNS = 100


@click.command()
@click.argument("name", required=False)
@api_options
def status(name: str | None, api: Api, output: str) -> None:
    """Show the pipelines of a running Headrace: each flow's progress, lag, state and watermark, and why it stalls.

    Example: headrace pipeline status tolls
    """
    found = [api.call(PipelineEndpoints.show, name=name)] if name else api.call(PipelineEndpoints.list)["pipelines"]
    _print(found, output)


def _change(endpoint: Endpoint, word: str, text: str) -> click.Command:
    @click.command(word, help=f"{text}\n\nExample: headrace pipeline {word} tolls")
    @click.argument("name")
    @api_options
    def command(name: str, api: Api, output: str) -> None:
        _print([api.call(endpoint, name=name)], output)

    return command


@click.command()
def prepare() -> None:
    """Fetch Spark's Kafka connector, and store what Spark's JVM loads, so that drivers start in half the time.

    It takes about a minute and 200 MB, once for each installation. Run it when an image is built.

    Example: headrace pipeline prepare
    """
    from headrace.pipelines.prepare import prepare as prepare_pipelines

    with install_progress() as progress:
        prepare_pipelines(progress)
    click.echo("ready")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("flow")
@click.option("--limit", type=click.IntRange(0), default=10, show_default=True, help="Rows of each store at most.")
@kafka_options
async def state(file: Path, flow: str, limit: int, cluster: ClusterSettings, output: str) -> None:
    """Show what a flow keeps between micro-batches: its stores, their number of rows, and some rows with their keys.

    It reads the checkpoint and changes nothing; the pipeline may run meanwhile.

    Example: headrace pipeline state tolls.yaml by_gate
    """
    from headrace.pipelines.driver.plan import DriverTask
    from headrace.pipelines.tasks import TaskDriver

    spec, _, checkpoint = _checkpoint_of(file, flow, cluster.file)
    async with TaskDriver.opened() as driver:
        task = DriverTask(kind="state", checkpoint=checkpoint, limit=limit)
        stores = (await driver.ask(file, spec, KafkaConfig(), task))["stores"]
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
    folder = ((settings or HeadraceConfig()).state_dir / "pipelines" / spec.name).absolute()
    checkpoint = folder / "checkpoints" / flow
    if not checkpoint.exists() and not (folder / "plans" / f"{flow}.json").exists():
        raise InvalidRequest(f"{folder} has no checkpoint of flow {flow}: -c names the file with another state_dir")
    return spec, folder, checkpoint


@click.group()
def checkpoint() -> None:
    """Discard the checkpoint of a flow.

    Example: headrace pipeline checkpoint discard tolls.yaml by_gate
    """


@checkpoint.command("discard")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("flow")
@click.option("--yes", is_flag=True, help="Do not ask.")
@config_option
def discard_(file: Path, flow: str, yes: bool, config: Path | None) -> None:
    """Delete the checkpoint of a flow, with its state: the flow begins at `starting` again.

    It is refused while a driver uses it: stop or pause the pipeline first.

    Example: headrace pipeline checkpoint discard tolls.yaml by_gate
    """
    _, folder, _ = _checkpoint_of(file, flow, find_settings(config))
    question = f"Flow {flow} will begin without its checkpoint and state in {folder}. Its rows may come again. Discard?"
    if yes or click.confirm(question, abort=True):
        discard(folder, flow)
        click.echo(f"flow {flow} begins at its next start as if it were new")


def _print(found: list[Mapping[str, Any]], output: str) -> None:
    if output == "json":
        print_json(found)
        return
    fields = {"batch": "batchId", "records": "inputRecords", "per_second": "recordsPerSecond", "lag": "lagRecords"}
    fields |= {"state_rows": "stateRows", "watermark": "watermark"}
    rows = [
        {
            "flow": f"{one['name']}.{name}",
            "state": flow["state"],
            **{title: "" if flow[field] is None else flow[field] for title, field in fields.items()},
        }
        for one in found
        for name, flow in one["flows"].items()
    ]
    print_rows(rows, output, "no pipelines here")
    for one in found:
        if one["reason"]:
            click.echo(textwrap.fill(f"{one['name']}: {one['reason']}", _COLUMNS, subsequent_indent="  "))


COMMANDS: Final = (
    status,
    state,
    checkpoint,
    prepare,
    _change(PipelineEndpoints.pause, "pause", "Pause a pipeline after its micro-batches, also over restarts."),
    _change(PipelineEndpoints.resume, "resume", "Start a pipeline again that is paused, stopped, failed or finished."),
    _change(PipelineEndpoints.stop, "stop", "Stop a pipeline after its micro-batches, until Headrace starts again."),
)
