"""`headrace generate`: files for Grafana, Prometheus and shells."""

import click
import yaml
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from headrace.cli.global_options import HeadraceCommand
from headrace.cli.output import print_json
from headrace.runtime.telemetry.monitoring import RUNBOOKS, alert_rules, dashboard

_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(cls=HeadraceCommand)
@click.argument("kind", type=click.Choice(["grafana", "alerts", "completion"]))
@click.argument("shell", type=click.Choice(list(_SHELLS)), required=False)
@click.option(
    "--runbooks",
    default=RUNBOOKS,
    show_default=True,
    help="URL of the page with a section for each alert, for the annotation `runbook_url`.",
)
@click.pass_context
def generate(ctx: click.Context, kind: str, shell: str | None, runbooks: str) -> None:
    """Print a Grafana dashboard (JSON), alert rules for Prometheus (YAML), or the completion of a SHELL.

    The first two have the metrics of this version. Import the dashboard in Grafana 10 or newer. Name the file with the
    rules in `rule_files` of prometheus.yml. For completion, write eval "$(headrace generate completion bash)" in the
    start file of the shell.

    Example: headrace generate alerts > headrace-alerts.yaml
    """
    if (kind == "completion") != bool(shell):
        raise click.UsageError("completion needs a shell, and only completion: bash, zsh or fish")
    if shell:
        click.echo(_SHELLS[shell](ctx.find_root().command, {}, "headrace", "_HEADRACE_COMPLETE").source())
    elif kind == "grafana":
        print_json(dashboard())
    else:
        click.echo(yaml.safe_dump(alert_rules(runbooks), sort_keys=False, width=1000, allow_unicode=True), nl=False)
