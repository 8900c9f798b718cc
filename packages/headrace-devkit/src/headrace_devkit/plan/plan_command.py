"""`headrace plan`: processes, threads, memory and delays of a configuration at given rates."""

import os
from pathlib import Path

import click

from headrace.cli.global_options import HeadraceCommand, uses
from headrace.cli.output import print_rows
from headrace.config.load import load_config
from headrace_devkit.plan.deployment_plan import plan
from headrace_devkit.plan.rates import read_rates

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("plan", cls=HeadraceCommand)
@click.argument("file", type=_FILE)
@click.option("--rates", "rates_file", required=True, type=_FILE, help="Records per second and partitions by consumer.")
@uses("output")
def plan_command(file: Path, rates_file: Path, output: str) -> None:
    """Print what the reactive consumers of FILE need at given rates: arithmetic, nothing is contacted.

    Example: headrace plan headrace.yaml --rates rates.yaml
    """
    config = load_config(file, os.environ, ["reactive_consumers"])
    print_rows([row._asdict() for row in plan(config.reactive_consumers, read_rates(rates_file))], output, "")
