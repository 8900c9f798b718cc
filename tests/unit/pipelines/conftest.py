"""Runs of pipelines on a loop of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.jvm import ClassArchive, Java
from headrace.pipelines import runs
from headrace.pipelines.process import Toolchain
from headrace.pipelines.spec import PipelineSpec
from tests.pipeline_bench import Bench, Test


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a test's steps on a loop, with a started run."""

    def go(
        steps: Test,
        kafka: KafkaConfig | None = None,
        missing: Mapping[str, Exception] | None = None,
        spec: PipelineSpec | None = None,
    ) -> None:
        async def main() -> None:
            bench = Bench(tmp_path, kafka or KafkaConfig(), spec)
            bench.missing.update(missing or {})

            class Starter:
                start = staticmethod(bench.start_driver)

            async def toolchain() -> Toolchain:
                return Toolchain((), ClassArchive(Java(Path("java"), Path("java/bin/java"), 17, ""), Path("jars")))

            async def at_once(function: Callable[[], Any]) -> Any:
                return function()

            monkeypatch.setattr(runs, "run_blocking", at_once)
            monkeypatch.setattr(runs, "DriverProcess", Starter)
            monkeypatch.setattr(runs, "find_toolchain", toolchain)
            await bench.run.start()
            await bench.clock.settle()
            try:
                await steps(bench)
            finally:
                await bench.run.stop()

        asyncio.run(main())

    return go
