"""The runs of a project: what the process with its definitions sends, and what Spark's texts mean for the flows."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headrace_pipelines.driver_protocol import DriverEvent, Failed, FlowFailed, FlowRunning

RUN_FAILED = "RUN_FAILED"
"""Name of an error: Spark ended the run of a project with a failed flow."""
_STATES = (
    re.compile(r"Flow '?(?P<flow>[^']+?)'? (?:is|has) (?P<state>RUNNING|COMPLETED|FAILED)\b"),
    re.compile(r"Flow '?(?P<flow>[^']+?)'? (?P<state>SKIPPED) due to upstream"),
    re.compile(r"Failed to resolve flow(?P<state> due to upstream failure)?: '(?P<flow>[^']+)'"),
)
"""Texts of Spark that change what is known of a flow. A flow that Spark cannot resolve does not run at all."""
_RETRY = "Spark runs it again, as often as spark.sql.pipelines.maxFlowRetryAttempts says"


class ProjectFile(msgspec.Struct):
    """A project, in the first line of standard input."""

    file: str
    document: dict[str, Any]
    """The content of the file, with its references replaced."""


class SparkText(msgspec.Struct, tag="text"):
    """A text of Spark about a flow or the run."""

    text: str


class RunEnded(msgspec.Struct, tag="ended"):
    """The end of a run."""

    failed: Failed | None = None


class RunEvents:
    """The flows of one run.

    A flow is running, completed, failed or skipped. Spark may say COMPLETED of a flow and FAILED after it; so completed
    becomes failed, and only running again ends that.
    """

    def __init__(self, flow_name: Callable[[str], str]) -> None:
        self._flow_name = flow_name
        self.states: dict[str, str] = {}
        """Flow to its state."""

    def apply(self, text: str) -> Iterator[DriverEvent]:
        """Apply a text of Spark, and yield what it means."""
        found = next((match for sign in _STATES if (match := sign.search(text))), None)
        if not found:
            return
        flow, state = self._flow_name(found["flow"]), found["state"]
        if text.startswith("Failed to resolve"):
            state = "SKIPPED" if state else "FAILED"
        if state == "COMPLETED" and self.states.get(flow) in ("FAILED", "SKIPPED"):
            return
        self.states[flow] = state
        if state == "RUNNING":
            yield FlowRunning(flow)
        elif state == "FAILED":
            yield FlowFailed(flow, RUN_FAILED, _RETRY)

    def failure(self, failed: Failed | None) -> Failed | None:
        """Return why the run failed, with its failed and skipped flows; None if it did not."""
        flows = [flow for flow, state in self.states.items() if state == "FAILED"]
        skipped = [flow for flow, state in self.states.items() if state == "SKIPPED"]
        if not failed and flows:
            failed = Failed(RUN_FAILED, "Spark ended the run, and gave no reason", retriable=True)
        if not failed:
            return None
        text = failed.text.rstrip(".\n ")
        text += f". Failed as well: {', '.join(flows[1:])}" if flows[1:] else ""
        text += f". Skipped, because they read a failed flow: {', '.join(skipped)}" if skipped else ""
        return msgspec.structs.replace(failed, text=text, part=f"flows.{flows[0]}" if flows else "")
