"""What other packages register by entry points: what an entry point brings, and which are refused."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from headrace import extras
from headrace.errors import EnvironmentProblem
from headrace_pipelines.sinks.sink_kinds import SINKS, registered


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:Sink", "the sink guest of the package no_such_module cannot be loaded: No module named"),
        ("headrace_pipelines.sinks.sink:NoSuchSink", "cannot be loaded: module .* has no attribute"),
        ("headrace_pipelines.sinks.sink:Sink", "is not a subclass of Sink"),
        ("headrace_pipelines.sinks.sink:FlowFacts", "is not a subclass of Sink"),
        ("other_topic_sink:OtherSink", "two packages have a sink topic: uninstall one of them"),
    ],
)
def test_an_entry_point_that_is_not_a_new_sink_is_refused_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    """Left out silently, its pipelines would fail with an unknown key."""
    text = "from headrace_pipelines.sinks.topic_sink import KafkaSink\nclass OtherSink(KafkaSink): pass\n"
    (tmp_path / "other_topic_sink.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "entry_points", lambda group: [EntryPoint("guest", value, group)])
    with pytest.raises(EnvironmentProblem, match=said):
        registered()


def test_every_kind_has_a_field_of_its_key() -> None:
    """A section is known by it, and the key names what it writes unless another one does."""
    for name, kind in SINKS.items():
        assert {name, kind.named_by or name, *kind.references} <= kind.model_fields.keys()
