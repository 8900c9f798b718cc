"""Commands on pipelines that run, and on their checkpoints; `headrace pipeline` has them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from headrace.cli.api import Api, api_options
from headrace.cli.connection import config_option, find_settings
from headrace.cli.output import install_progress, print_json, print_rows
from headrace.config.model import HeadraceConfig
from headrace.errors import InvalidRequest
from headrace.pipelines.checkpoints import discard
from headrace.pipelines.load import load_pipeline
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
    spec, settings = load_pipeline(file), find_settings(config) or HeadraceConfig()
    if flow not in spec.running:
        raise InvalidRequest(f"{file} has no flow {flow}: there are {', '.join(spec.running)}")
    folder = (settings.state_dir / "pipelines" / spec.name).absolute()
    if not (folder / "checkpoints" / flow).exists() and not (folder / "plans" / f"{flow}.json").exists():
        raise InvalidRequest(f"{folder} has no checkpoint of flow {flow}: -c names the file with another state_dir")
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
    checkpoint,
    prepare,
    _change(PipelineEndpoints.pause, "pause", "Pause a pipeline after its micro-batches, also over restarts."),
    _change(PipelineEndpoints.resume, "resume", "Start a pipeline again that is paused, stopped, failed or finished."),
    _change(PipelineEndpoints.stop, "stop", "Stop a pipeline after its micro-batches, until Headrace starts again."),
)
