"""Runs of pipelines that are started."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace_pipelines import driver_inputs
from headrace_pipelines.spec import PipelineSpec
from tests.pipeline_harness import Harness, Started, toolchain
from tests.running_server import pytest_pyfunc_call, server  # noqa: F401


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Start a run: `async with started() as harness`."""

    async def at_once(function: Callable[[], Any]) -> Any:
        return function()

    @contextlib.asynccontextmanager
    async def start(
        kafka: KafkaConfig | None = None,
        missing: Mapping[str, Exception] | None = None,
        spec: PipelineSpec | None = None,
    ) -> AsyncIterator[Harness]:
        harness = Harness(tmp_path, kafka or KafkaConfig(), spec)
        harness.missing.update(missing or {})
        monkeypatch.setattr(driver_inputs, "run_blocking", at_once)
        monkeypatch.setattr("headrace_pipelines.runs.DriverProcess.start", harness.start_driver)
        monkeypatch.setattr(driver_inputs, "find_toolchain", toolchain)
        await harness.run.start()
        await harness.clock.settle()
        try:
            yield harness
        finally:
            await harness.run.stop()

    return start
