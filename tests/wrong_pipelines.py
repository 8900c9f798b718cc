"""The pipeline files of `wrong_pipelines.yaml`: each is one right file with a few changes, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

SQL, SINK = "SELECT gate, count(*) AS n FROM passages GROUP BY gate", "{topic: by_gate, key: gate}"
RIGHT = f"""\
name: tolls
sources:
  passages:
    topic: passages
    schema: "plate STRING, gate STRING, cents INT, at TIMESTAMP"
  plates:
    topic: plates
    schema: "plate STRING, owner STRING, since TIMESTAMP"
views:
  heavy: SELECT * FROM passages WHERE cents >= 500
flows:
  by_gate:
    sql: {SQL}
    sink: {SINK}
"""
CODE = "from headrace_pipelines.processors import MapState, Processor, ValueState\n"
GATES = """\
class Gates(Processor):
    columns = "gate STRING, n BIGINT"
    n = ValueState("BIGINT")

    def process(self, key, row):
        yield {"gate": key, "n": 1}
"""
PROCESSOR = "{processor: gates:Gates, reads: [passages], key: gate, sink: {topic: by_gate2}}"
CASES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
KNOWN_TO_SPARK = {name for name, case in CASES.items() if case.get("plan")}


def said_of(name: str) -> list[str]:
    """Return the sentences, each with the line and the place in the file."""
    says = CASES[name]["says"]
    return [says] if isinstance(says, str) else list(says)


def write_wrong(folder: Path, name: str) -> Path:
    """Write a file with its table beside it."""
    case = CASES[name]
    text = case.get("text", RIGHT)
    if "processor" in case:
        text = f"{RIGHT}  gates: {PROCESSOR}\n"
        case = {**case, "change": {PROCESSOR: case["processor"] or PROCESSOR, **case.get("change", {})}}
    query = {f"sql: {SQL}": case["query"]} if "query" in case else {SQL: case.get("sql", SQL)}
    changes = {**query, SINK: case.get("sink", SINK), **case.get("change", {})}
    for old, new in changes.items():
        assert text.count(old) == 1 or "text" in case, old
        text = text.replace(old, new)
    file = folder / f"{name}.yaml"
    file.write_text(text + case.get("more", ""))
    (folder / "plates.csv").write_text("plate,owner,since\n")
    if "processor" in case:
        code = case.get("code", GATES)
        for right, wrong in case.get("wrong", {}).items():
            assert code.count(right) == 1, right
            code = code.replace(right, wrong)
        (folder / "gates.py").write_text(CODE + code)
    return file
