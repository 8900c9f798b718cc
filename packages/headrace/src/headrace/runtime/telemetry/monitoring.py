"""A Grafana dashboard and Prometheus' alert rules, made of two tables and the catalogue of metrics.

Source: Grafana's JSON model of dashboards, schema version 39; Prometheus' format of rule files.
"""

import re
from pathlib import Path
from typing import Any, Final

import yaml

from headrace.runtime.telemetry.metrics import CATALOGUE

_METRIC: Final = re.compile(r"\b((?:headrace|nuclio_processor|process|python)_[a-z_]+)(\{)?")
_PER_LINE: Final = 3
_WIDTH: Final = 24 // _PER_LINE
_HEIGHT: Final = 7


def _table(name: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(name).read_text())


RUNBOOKS: Final[str] = _table("alerts.yaml")["runbooks"]
"""Page that has a section for each alert, in the sources."""


def alert_rules(runbooks: str) -> dict[str, Any]:
    """Return the content of a rule file.

    Args:
        runbooks: Path or URL of the page that has a section for each alert.
    """
    rules = [
        {
            "alert": row["alert"],
            "expr": row["expr"],
            "for": row["for"],
            "labels": {"severity": row["severity"]},
            "annotations": {
                "summary": row["summary"],
                "description": row["description"],
                "runbook_url": f"{runbooks}#{row['alert'].lower()}",
            },
        }
        for row in _table("alerts.yaml")["alerts"]
    ]
    return {"groups": [{"name": "headrace", "rules": rules}]}


def dashboard() -> dict[str, Any]:
    """Return a dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, rows in _table("panels.yaml").items():
        row: dict[str, Any] = {"type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({**row, "id": len(panels) + 1, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        first = len(panels) + 1
        panels += [_panel(*cells, number=first + index, index=index, y=y + 1) for index, cells in enumerate(rows)]
        y += 1 + _HEIGHT * -(-len(rows) // _PER_LINE)
    return {
        "uid": "headrace",
        "title": "Headrace",
        "tags": ["kafka", "headrace"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def queries(found: dict[str, Any]) -> list[str]:
    """Return the queries of a dashboard, with its variables."""
    return [target["expr"] for panel in found["panels"] for target in panel.get("targets", ())]


def _panel(title: str, query: str, unit: str, legend: str, *, number: int, index: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    names = {match[1] for match in _METRIC.finditer(query)}
    helps = [spec.help for spec in CATALOGUE if names & {spec.name, f"{spec.name}_bucket", f"{spec.name}_count"}]
    line, column = divmod(index, _PER_LINE)
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": "; ".join(helps),
        "datasource": source,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": _WIDTH * column, "y": y + _HEIGHT * line},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [{"refId": "A", "datasource": source, "expr": _of_instances(query), "legendFormat": legend}],
    }


def _of_instances(query: str) -> str:
    """Return a query for the chosen instances."""
    chosen = 'instance=~"$instance"'
    return _METRIC.sub(lambda match: f"{match[1]}{{{chosen}" + ("," if match[2] else "}"), query)


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    query = "label_values(headrace_ready, instance)"
    instances = {"name": "instance", "type": "query", "query": query, "refresh": 2, "label": "Instance"}
    instances |= {"datasource": {"type": "prometheus", "uid": "${datasource}"}, "multi": True, "includeAll": True}
    return [source, {**instances, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}]
