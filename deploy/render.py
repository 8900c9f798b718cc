"""Renders the Helm chart without Helm, and writes `deploy/kubernetes/`: `python deploy/render.py`.

It knows what the templates of this chart use: `if`, values, `toYaml` and `nindent`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CHART = HERE / "helm" / "headrace"
HEAD = "# Written by deploy/render.py from deploy/helm/headrace, with the values of the chart.\n"
_ACTION = re.compile(
    r"(?P<trim>\s*\{\{-|\{\{)\s*(?P<yaml>toYaml )?\.Values\.(?P<path>[\w.]+)(?: \| nindent (?P<by>\d+))?\s*\}\}"
)
_PART = re.compile(r"\A\{\{- if \.Values\.(\w+)\.enabled \}\}\n(.*)\{\{- end \}\}\n\Z", re.DOTALL)


def parts() -> list[str]:
    """Return the names of the parts, each of which is a template."""
    return sorted(path.stem for path in (CHART / "templates").glob("*.yaml"))


def render(part: str) -> str:
    """Return the manifests of one part with the values of the chart, as if it were enabled."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    template = (CHART / "templates" / f"{part}.yaml").read_text()
    found = _PART.match(template)
    if not found or found[1] != part:
        raise ValueError(f"templates/{part}.yaml is not one block `if .Values.{part}.enabled`")
    text = _ACTION.sub(lambda action: _value(action, values), found[2])
    if "{{" in text:
        raise ValueError(f"templates/{part}.yaml uses what this program does not know")
    return text


def _value(action: re.Match[str], values: dict[str, Any]) -> str:
    value: Any = values
    for name in action["path"].split("."):
        value = value[name]
    text = yaml.safe_dump(value).rstrip() if action["yaml"] else str(value)
    if not action["by"]:
        return text
    return "\n" + "\n".join(" " * int(action["by"]) + line if line else "" for line in text.split("\n"))


if __name__ == "__main__":
    for name in parts():
        (HERE / "kubernetes" / f"{name}.yaml").write_text(HEAD + render(name))
