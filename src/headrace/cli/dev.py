"""`headrace dev`: real Kafka and a schema registry on this machine."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from headrace.cli.output import output_option, print_json, print_rows
from headrace.devcluster import DevCluster, environment
from headrace.jvm import Progress

directory_option = click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".headrace/dev"),
    show_default=True,
    help="Where data, logs and endpoints.json are kept.",
)
_port = click.IntRange(1, 65_000)


@click.group()
def dev() -> None:
    """Run a real Kafka and schema registry on this machine, without containers.

    Example: eval "$(headrace dev up)"
    """


@dev.command()
@click.option("--brokers", type=click.Choice(["1", "3"]), help="Number of brokers; as last time, else 1.")
@click.option("--registry/--no-registry", default=True, help="Whether to start the schema registry too.")
@click.option("--port", type=_port, help="Port of broker 1, the others take the next ones; else free ones.")
@click.option("--registry-port", type=_port, help="Port of the schema registry; else a free one.")
@directory_option
@output_option
def up(
    brokers: str | None, registry: bool, port: int | None, registry_port: int | None, directory: Path, output: str
) -> None:
    """Start the cluster, or what is missing of it, and print where it is as lines for `eval`.

    Example: eval "$(headrace dev up --brokers 3)"
    """
    started = time.monotonic()
    with _progress() as progress:
        cluster = DevCluster(directory, progress)
        endpoints = cluster.up(
            brokers=int(brokers) if brokers else None, registry=registry, port=port, registry_port=registry_port
        )
    click.echo(f"up after {time.monotonic() - started:.1f} s; see {cluster.endpoints_file}", err=True)
    _print_endpoints(endpoints, output)


@dev.command()
@directory_option
def down(directory: Path) -> None:
    """Stop the cluster; its data stays for the next `up`.

    Example: headrace dev down
    """
    click.echo("stopped" if DevCluster(directory).down() else "nothing was running", err=True)


@dev.command()
@click.option("--env", is_flag=True, help="Print lines for eval.")
@directory_option
@output_option
def status(env: bool, directory: Path, output: str) -> int:
    """Show each server; the exit code is 0 if all of them run, else 1.

    Example: eval "$(headrace dev status --env)"
    """
    cluster = DevCluster(directory)
    if env:
        _print_endpoints(cluster.endpoints(), output)
        return 0
    servers = cluster.status()
    rows = [
        {
            "server": server.name,
            "state": "running" if server.running else "stopped",
            "port": server.port,
            "pid": server.pid or None,
            "resident_mib": server.resident_bytes // 2**20 or None,
            "log": str(server.log),
        }
        for server in servers
    ]
    print_rows(rows, output, "no dev cluster here: headrace dev up")
    return 0 if servers and all(server.running for server in servers) else 1


@dev.command()
@click.option("-n", "--lines", type=click.IntRange(0), default=40, show_default=True, help="Lines per server.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on, until Ctrl-C.")
@directory_option
def logs(lines: int, follow: bool, directory: Path) -> None:
    """Show the last lines of each server's log.

    Example: headrace dev logs --follow
    """
    files = [server.log for server in DevCluster(directory).status()]
    ends = {}
    for file in files:
        text = file.read_text(errors="replace")
        ends[file] = file.stat().st_size
        click.echo(f"== {file}\n" + "\n".join(text.splitlines()[-lines:] if lines else []))
    while follow:
        for file, end in ends.items():
            with file.open("rb") as log:
                log.seek(end)
                added = log.read()
            ends[file] = end + len(added)
            click.echo(added.decode(errors="replace"), nl=False)
        time.sleep(0.3)


@dev.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@directory_option
def reset(yes: bool, directory: Path) -> None:
    """Stop the cluster and delete every topic, schema and log of it.

    Example: headrace dev reset --yes
    """
    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete everything in {directory.resolve()}?", abort=True, err=True)
    DevCluster(directory).reset()
    click.echo("deleted", err=True)


def _print_endpoints(endpoints: dict[str, Any], output: str) -> None:
    if output == "json":
        print_json(endpoints)
    else:
        for name, value in environment(endpoints).items():
            click.echo(f"export {name}={shlex.quote(value)}")


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Show what a first start downloads and prepares: a bar on a terminal, a line per step elsewhere."""
    if not sys.stderr.isatty():
        said: set[str] = set()

        def say(what: str, done: int, total: int) -> None:
            if what not in said:
                said.add(what)
                click.echo(what + (f" ({total / 1e6:.0f} MB)" if total else ""), err=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=None)
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total or None)
