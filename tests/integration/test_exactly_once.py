"""A function whose outputs and offsets are committed together, on a real broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.records import OutgoingRecord, Record
from headrace.testing import HeadraceProcess
from tests.exactly_once import violations

HANDLER = """
def handler(context, event):
    return event.id
"""


def by_id(record: Record) -> list[bytes | None]:
    """Return the output of a record: its place."""
    return [f"{record.topic}-{record.partition}-{record.offset}".encode()]


@pytest.fixture
def function(site: Any, headrace: Any, tmp_path: Path) -> Callable[..., HeadraceProcess]:
    """Run a handler exactly once: `function(source, target, code, **attributes)`."""

    def start(source: str, target: str, code: str = HANDLER, more: Any = None, **attributes: Any) -> HeadraceProcess:
        (tmp_path / "work.py").write_text(code)
        own = {"topics": [source], "consumerGroup": f"{source}-work", "delivery": "exactly_once", "attempts": 2}
        trigger = {
            "kind": "kafka-cluster",
            "numWorkers": 2,
            "attributes": {**own, "outputTopic": target, "outputFormat": "string", **attributes},
        }
        spec = {"handler": "work:handler", "triggers": {"in": trigger}}
        (tmp_path / "function.yaml").write_text(yaml.safe_dump({"metadata": {"name": "work"}, "spec": spec}))
        return headrace({**site.config, **(more or {}), "functions": [str(tmp_path / "function.yaml")]})

    return start


def fill(site: Any, source: str, count: int, partitions: int = 3) -> None:
    """Write records, in turns to every partition."""
    site.write(source, *(OutgoingRecord(source, b"k%d" % n, b"%d" % n, None, n % partitions) for n in range(count)))


def test_outputs_and_offsets_move_together(site: Any, topic: Any, function: Any) -> None:
    """Every output is visible once and in order, every offset is committed, by transactions of many records."""
    source, target = topic(3), topic(3)
    fill(site, source, 3000)
    process = function(source, target)
    site.wait_until(lambda: sum(site.committed(f"{source}-work").values()) == 3000, "every record committed")
    outputs = site.records(target)
    committed = site.committed(f"{source}-work")
    assert violations(site.records(source), outputs, committed, by_id, ordered=True) == []
    assert len(outputs) == 3000
    transactions = sum(max(r.offset for r in outputs if r.partition == n) + 1 for n in range(3)) - 3000
    assert transactions < 300, "markers between the outputs"
    assert process.terminate() == 0
    assert "Traceback" not in process.output
