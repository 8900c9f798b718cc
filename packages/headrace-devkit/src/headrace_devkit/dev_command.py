"""`headrace dev`: real Kafka and a schema registry on this machine."""

import shlex
import sys
import time
from typing import Any

import click

from headrace.cli.global_options import HeadraceGroup, uses
from headrace.cli.output import install_progress, print_result, print_rows
from headrace.config.dev_endpoints import HOME, environment
from headrace_devkit.devcluster import DevCluster

_port = click.IntRange(1, 65_000)


@click.group(cls=HeadraceGroup)
def dev() -> None:
    """Run a real Kafka and schema registry on this machine, without containers. Data and logs are in .headrace/dev.

    Example: eval "$(headrace dev up)"
    """


@dev.command()
@click.option("--brokers", type=click.Choice([1, 3]), help="Number of brokers; by default as at the last start, or 1.")
@click.option(
    "--registry/--no-registry",
    default=None,
    help="Whether to start the schema registry; by default if the folder has one or is new.",
)
@click.option("--port", type=_port, help="Port of broker 1, the others use the next ones; by default free ones.")
@click.option("--registry-port", type=_port, help="Port of the schema registry; by default a free one.")
@click.option("--secured/--no-secured", default=None, help="Whether to add listeners with TLS, logins, ACLs.")
@uses("output")
def up(output: str, **options: Any) -> None:
    """Start the servers that are not running, and print their addresses as lines for `eval`.

    Example: eval "$(headrace dev up --brokers 3)"
    """
    started = time.monotonic()
    with install_progress() as progress:
        cluster = DevCluster()
        endpoints = cluster.up(progress=progress, **options)
    report_late(cluster)
    click.echo(f"up after {time.monotonic() - started:.1f} s; see {cluster.endpoints_file}", err=True)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment(endpoints).items()]
    print_result(endpoints, "\n".join(lines), output)


def report_late(cluster: DevCluster) -> None:
    """Print that the registry still starts, if it does."""
    if cluster.late:
        text = (
            "Kafka is up, and the registry is still starting: headrace dev status; headrace dev up waits for it again"
        )
        click.echo(f"{cluster.late}\n{text}", err=True)


@dev.command()
def down() -> None:
    """Stop the cluster; its data stays for the next `up`.

    Example: headrace dev down
    """
    click.echo("stopped" if DevCluster().down() else "nothing was running", err=True)


@dev.command()
@click.option("--logs", "lines", type=click.IntRange(1), help="Also print this many last lines of each server's log.")
@uses("output")
def status(lines: int | None, output: str) -> int:
    """Show each server; the exit code is 0 if all of them run, otherwise 1.

    Example: headrace dev status --logs 40
    """
    servers = DevCluster().status()
    rows = [{**server._asdict(), "log": str(server.log)} for server in servers]
    print_rows(rows, output, "no dev cluster here: headrace dev up")
    for server in servers if lines else ():
        last = server.log.read_text(errors="replace").splitlines()[-(lines or 0) :]
        click.echo("\n".join([f"== {server.log}", *last]), err=output == "json")
    return 0 if servers and all(server.running for server in servers) else 1


@dev.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def reset(yes: bool) -> None:
    """Stop the cluster and delete all its topics, schemas and logs.

    Example: headrace dev reset --yes
    """
    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete everything in {HOME.resolve()}?", abort=True, err=True)
    DevCluster().reset()
    click.echo("deleted", err=True)
