"""A corpus of wrong function files: each problem has its file, its line, what is wrong and what to do."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from headrace.errors import FunctionInvalid
from headrace.functions.load import load_function
from yaml_table import table

BASE = table(__file__, "base")
CODE = "def handler(context, event): ...\n"
BEHIND = {
    "metadata": ("  name: f\n", ""),
    "annotation": ("  name: f\n", "  annotations:\n  "),
    "spec": ("  handler: main:handler\n", ""),
    "trigger": ("      kind: kafka-cluster\n", ""),
    "attributes": ("        consumerGroup: g\n", ""),
}
"""Behind which line a case is inserted."""
REMEDY = re.compile(
    r"did you mean|should be|(: |so )(write|add|correct|remove|keep|set|put|save|take|known|omit)|Correct this line"
)
CASES = [*csv.DictReader(Path(__file__).with_name("wrong_functions.csv").read_text().splitlines())]


def file_of(where: str, text: str) -> tuple[bytes, str]:
    """Return the file and the code of a case."""
    text = text.replace("\\n", "\n").replace("\\t", "\t")
    if where == "file":
        return f"{text}\n".encode("latin-1"), CODE
    if where == "code":
        return BASE.encode(), text
    if where == "replace":
        before, after = text.split("=>")
        assert before in BASE
        return BASE.replace(before, after).encode(), CODE
    made = BASE
    for part, line in zip(where.split("+"), text.split("=>"), strict=True):
        anchor, more = BEHIND[part]
        indent = re.match(" *", anchor)[0]  # type: ignore[index]
        made = made.replace(anchor, anchor + more + indent + line.replace("\n", f"\n{indent}") + "\n")
    return made.encode(), CODE


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['cause']}-{case['text'][:40]}")
def test_a_wrong_file_names_line_problem_and_remedy(tmp_path: Path, case: dict[str, str]) -> None:
    """The first problem is the one of the table; nothing of the handler's module runs."""
    text, code = file_of(case["where"], case["text"])
    (tmp_path / "function.yaml").write_bytes(text)
    (tmp_path / "main.py").write_text(code + "\nraise SystemExit('the module ran')\n")
    with pytest.raises(FunctionInvalid) as caught:
        load_function(tmp_path, check_handler=True)
    first = caught.value.description.splitlines()[0]
    at = f"{tmp_path}/function.yaml" + (f":{case['line']}" if case["line"] else "")
    assert first == f"{at}: {case['says'].replace('{folder}', str(tmp_path))}"
    assert REMEDY.search(first), "no remedy"
