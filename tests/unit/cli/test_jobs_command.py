"""How jobs are shown."""

from __future__ import annotations

import pytest

from headrace.cli.jobs import print_job


def test_how_far_a_job_is_waits_until_its_size_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that has only begun, or was refused, has counted nothing yet."""
    job = {"id": "redrive-1", "kind": "redrive", "state": "failed", "spec": {"topic": "t.dlq"}, "by": "ann"}
    job |= {"since": "now", "message": "nothing matches"}
    print_job({**job, "progress": {"done": 0}}, "text")
    assert "done" not in capsys.readouterr().out
    print_job({**job, "progress": {"done": 0, "total": 2}}, "text")
    assert "done      0 of 2" in capsys.readouterr().out
