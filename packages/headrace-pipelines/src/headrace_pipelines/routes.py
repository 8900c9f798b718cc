"""`/adm/pipelines`: status of the pipelines of this process, pause, resume and stop."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import NotFound, PathNotFound
from headrace.http.endpoint import ADMINISTER, SEE, Call, CallEvent, Endpoint, may_control
from headrace_pipelines.report import PipelineStatus

if TYPE_CHECKING:
    from headrace_pipelines.runs import PipelineRun

_PIPELINES = "/adm/pipelines"
_PIPELINE = f"{_PIPELINES}/{{name}}"


class Pipelines(msgspec.Struct):
    """The pipelines of this process."""

    pipelines: list[PipelineStatus]


class PipelineEndpoints:
    """Status and control of the pipelines of this process."""

    def __init__(self, runs: "Mapping[str, PipelineRun]") -> None:
        self._runs = runs

    @Endpoint("GET", _PIPELINES, "listPipelines", "Every pipeline of this process, with the progress of its flows", SEE)
    async def list(self, call: Call[None, None]) -> Pipelines:
        return Pipelines([run.report() for run in self._visible(call).values()])

    @Endpoint("GET", _PIPELINE, "showPipeline", "Status of a pipeline and its flows", SEE, errors=(NotFound,))
    async def show(self, call: Call[None, None]) -> PipelineStatus:
        return self._run(call).report()

    @Endpoint(
        "POST",
        f"{_PIPELINE}/{{action}}",
        "changePipeline",
        "End a pipeline's driver after its micro-batches: `pause` also over restarts, `stop` until this process starts "
        "again; or `resume` it",
        ADMINISTER,
        errors=(NotFound, PathNotFound),
        audited="pipeline",
    )
    async def change(self, call: Call[None, None]) -> PipelineStatus:
        action = call.action("pause", "resume", "stop")
        call.event = CallEvent(f"pipeline {call.parameters['name']}", detail=action)
        run = self._run(call)
        if action == "resume":
            run.resume()
        else:
            await run.hold("paused" if action == "pause" else "stopped")
        return run.report()

    def _visible(self, call: Call[Any, Any]) -> "Mapping[str, PipelineRun]":
        return self._runs if may_control(call.request, "") else {}

    def _run(self, call: Call[Any, Any]) -> "PipelineRun":
        name, visible = call.parameters["name"], self._visible(call)
        if name not in visible:
            raise NotFound(f"this process has no pipeline {name[:60]!r}; it has {', '.join(visible) or 'none'}")
        return visible[name]
