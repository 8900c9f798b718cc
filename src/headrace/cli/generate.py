"""`headrace generate`: files for Grafana and Prometheus."""

import click
import yaml

from headrace.cli.output import print_json
from headrace.runtime.telemetry.monitoring import RUNBOOKS, alert_rules, dashboard


@click.command()
@click.argument("kind", type=click.Choice(["grafana", "alerts"]))
@click.option(
    "--runbooks",
    default=RUNBOOKS,
    show_default=True,
    help="URL of the page with a section for each alert, for the annotation `runbook_url`.",
)
def generate(kind: str, runbooks: str) -> None:
    """Print a Grafana dashboard (JSON), or alert rules for Prometheus (YAML), for the metrics of this version.

    Import the dashboard in Grafana 10 or newer. Name the file with the rules in `rule_files` of prometheus.yml.

    Example: headrace generate alerts > headrace-alerts.yaml
    """
    if kind == "grafana":
        print_json(dashboard())
    else:
        click.echo(yaml.safe_dump(alert_rules(runbooks), sort_keys=False, width=1000, allow_unicode=True), nl=False)
