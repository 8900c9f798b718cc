"""`/adm/pipelines`: status of the pipelines of this process, pause, resume and stop."""

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.errors import NotFound
from headrace.http.endpoint import ADMINISTER, SEE, Call, CallEvent, Endpoint, may_control
from headrace.pipelines.runs import PipelineRun
from headrace.pipelines.status import PipelineStatus

_PIPELINES = "/adm/pipelines"
_PIPELINE = f"{_PIPELINES}/{{name}}"
_END = "End a pipeline's driver after its micro-batches, until it is resumed"
_changes = functools.partial(Endpoint, rule=ADMINISTER, errors=(NotFound,))


class Pipelines(msgspec.Struct):
    """The pipelines of this process."""

    pipelines: list[PipelineStatus]


class PipelineEndpoints:
    """Status and control of the pipelines of this process."""

    def __init__(self, runs: Mapping[str, PipelineRun]) -> None:
        self._runs = runs

    @Endpoint("GET", _PIPELINES, "listPipelines", "Every pipeline of this process, with the progress of its flows", SEE)
    async def list(self, call: Call[None, None]) -> Pipelines:
        return Pipelines([run.report() for run in self._visible(call).values()])

    @Endpoint("GET", _PIPELINE, "showPipeline", "Status of a pipeline and its flows", SEE, errors=(NotFound,))
    async def show(self, call: Call[None, None]) -> PipelineStatus:
        return self._run(call).report()

    @_changes("POST", f"{_PIPELINE}/pause", "pausePipeline", f"{_END}, also over restarts", audited="pause")
    async def pause(self, call: Call[None, None]) -> PipelineStatus:
        run = self._audited_run(call)
        await run.hold("paused")
        return run.report()

    @_changes("POST", f"{_PIPELINE}/stop", "stopPipeline", f"{_END} or this process starts again", audited="stop")
    async def stop(self, call: Call[None, None]) -> PipelineStatus:
        run = self._audited_run(call)
        await run.hold("stopped")
        return run.report()

    @_changes("POST", f"{_PIPELINE}/resume", "resumePipeline", "Start a pipeline that does not run", audited="resume")
    async def resume(self, call: Call[None, None]) -> PipelineStatus:
        run = self._audited_run(call)
        run.resume()
        return run.report()

    def _visible(self, call: Call[Any, Any]) -> Mapping[str, PipelineRun]:
        return self._runs if may_control(call.scope, "") else {}

    def _run(self, call: Call[Any, Any]) -> PipelineRun:
        name, visible = call.parameters["name"], self._visible(call)
        if name not in visible:
            raise NotFound(f"this process has no pipeline {name[:60]!r}; it has {', '.join(visible) or 'none'}")
        return visible[name]

    def _audited_run(self, call: Call[Any, Any]) -> PipelineRun:
        call.event = CallEvent(f"pipeline {call.parameters['name']}")
        return self._run(call)
