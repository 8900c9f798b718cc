"""Traces of a calibration script, without what may differ: times, names, and how members are interleaved."""

from typing import Any

from headrace_devkit.devcluster import Cluster
from headrace_devkit.simulation.calibration import group_scripts, record_scripts  # noqa: F401 they fill SCRIPTS
from headrace_devkit.simulation.calibration.broker_stage import BrokerStage
from headrace_devkit.simulation.calibration.model_stage import ModelStage
from headrace_devkit.simulation.calibration.scripts import SCRIPTS
from headrace_devkit.simulation.calibration.stages import Stage

Trace = dict[str, list[str]]
SEEDS = 300
"""How many runs of the model are tried: a trace of the real ones is one of theirs."""


def on_the_model(name: str, protocol: str, seed: int) -> Trace:
    """Run a script on the model and return its trace."""
    script = SCRIPTS[name]
    stage = ModelStage(protocol, seed, script.brokers)
    script.run(stage)
    stage.close_all()
    if stage.world.problems:
        raise AssertionError(str(stage.world.problems))
    return trace_of(stage, exact=script.exact)


def on_the_broker(name: str, protocol: str, cluster: Cluster) -> Trace:
    """Run a script on a real cluster and return its trace."""
    script = SCRIPTS[name]
    stage = BrokerStage(protocol, cluster)
    try:
        script.run(stage)
        stage.close_all()
        return trace_of(stage, exact=script.exact)
    finally:
        stage.end()


def explained(name: str, protocol: str, found: Trace) -> str:
    """Return why no run of the model gives this trace, empty if one does.

    What members do at the same time may be answered in any order, so one seed is not enough.
    """
    nearest: Trace = {}
    for seed in range(1, SEEDS + 1):
        trace = on_the_model(name, protocol, seed)
        if trace == found:
            return ""
        if not nearest or _differences(trace, found) < _differences(nearest, found):
            nearest = trace
    pairs = [(one, nearest.get(one), found.get(one)) for one in {**nearest, **found}]
    rows = [f"{one}: model {model}, broker {broker}" for one, model, broker in pairs if model != broker]
    return f"none of {SEEDS} runs of the model; the nearest one differs in " + "; ".join(rows)


def _differences(one: Trace, other: Trace) -> int:
    return sum(one.get(name) != other.get(name) for name in {**one, **other})


def trace_of(stage: Stage, *, exact: bool) -> Trace:
    """Return the events of each member in their order, and the checkpoints."""
    found = {member.name: _of_member(stage, member.events[: member.ends_at], exact=exact) for member in stage.members}
    return {**found, "checkpoints": [str(note) for note in stage.notes]}


def _of_member(stage: Stage, events: list[list[Any]], *, exact: bool) -> list[str]:
    lines: list[str] = []
    offsets: dict[str, list[int]] = {}

    def label(topic: str, partition: int) -> str:
        index = stage.topics.index(topic) if topic in stage.topics else topic.rpartition("-")[2]
        return f"t{index}-{partition}"

    def flush() -> None:
        for name, numbers in sorted(offsets.items()):
            lines.append(f"{name}: {_ranges(numbers)}")
        offsets.clear()

    for name, *values in events:
        if name in ("failure", "metadata"):
            continue  # how often a client tries is chance, and ids differ; scripts use those that matter
        if name == "record":
            topic, partition, offset = values
            offsets.setdefault(label(topic, partition), []).append(offset)
            continue
        flush()
        if name in ("assign", "revoke", "lost", "assignment"):
            names = [label(*one) for one in values[0]]
            lines.append(f"{name} {names if exact else len(names)}")
        elif name == "on_commit":
            error, results = values
            lines.append(f"on_commit {error} {[[label(t, n), offset, why] for t, n, offset, why in results]}")
        elif name == "end":
            lines.append(f"end {label(*values[:2])} {values[2]}")
        elif name == "error":
            lines.append(f"error {values[0]} {label(*values[1:]) if len(values) > 1 else ''}".rstrip())
        else:
            lines.append(" ".join(map(str, [name, *values])))
    flush()
    return lines


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
