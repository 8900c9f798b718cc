"""What the assembly puts together, without starting it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.app.app import App
from headrace.app.ready_announcer import ReadyAnnouncer
from headrace.config.producer_config import ProducerConfig
from headrace.config.whole_file import WholeFile
from headrace.errors import ConfigError
from headrace.process_context import inner_settings
from headrace.runtime import Readiness, Service, Supervisor, SystemClock
from headrace.runtime.notification import Notifications
from headrace_devkit.testing import ManualClock


class Slow(Service):
    """Is ready when told."""

    waits_for = "Spark has been starting for {:.0f} s"
    clock = ManualClock()

    def readiness(self) -> Readiness:
        return Readiness(not self.waits_for, self.waits_for.format(self.clock.monotonic() - 1_000_000))


def test_what_a_start_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """After a moment, after growing pauses while the reason is the same, soon when it changes; at the end how long."""

    async def run() -> None:
        slow, announced = Slow("pipeline p"), []
        clock = slow.clock
        supervisor = Supervisor([slow], clock, 1)
        announcer = ReadyAnnouncer(supervisor, clock, lambda: announced.append(clock.monotonic()), Notifications({}))
        await supervisor.start()
        await announcer.start()
        await clock.advance(1.5)
        assert caplog.messages == []
        await clock.advance(130)
        lasting = "not ready yet: pipeline p: Spark has been starting for {} s"
        assert caplog.messages == [lasting.format(seconds) for seconds in (2, 17, 47, 107)]
        slow.waits_for = "no driver"
        await clock.advance(16)
        assert caplog.messages[4:] == ["not ready yet: pipeline p: no driver"]
        slow.waits_for = ""
        await clock.advance(1)
        assert caplog.messages[5:] == ["ready after 147.6 s"]
        assert len(announced) == 1
        await announcer.stop()

    caplog.set_level("INFO")
    asyncio.run(run())


PUSH = {"a": {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost:1"}}}


@pytest.mark.parametrize(("given", "linger_ms"), [({}, 5), ({"linger.ms": 0}, 0)])
def test_outputs_fill_larger_batches_unless_the_file_says_otherwise(given: dict[str, Any], linger_ms: float) -> None:
    """Frames have many records, and each batch costs the broker and the client."""
    settings = inner_settings(WholeFile(producer=ProducerConfig(properties=given)))
    assert settings.properties["linger.ms"] == linger_ms


def test_a_consumer_and_a_trigger_of_the_same_name_are_refused(tmp_path: Path) -> None:
    """Pauses, seeks and replays go by the name, so one of them could not be controlled."""
    (tmp_path / "work.py").write_text("def handle(context, event): ...\n")
    trigger = {"kind": "kafka-cluster", "attributes": {"topics": ["t"], "consumerGroup": "h"}}
    spec = {"handler": "work:handle", "runtime": "python", "triggers": {"in": trigger}}
    (tmp_path / "function.yaml").write_text(json.dumps({"metadata": {"name": "work"}, "spec": spec}))
    settings = {"reactive_consumers": {"work.in": PUSH["a"]}, "functions": [str(tmp_path)]}

    async def make() -> None:
        App(WholeFile.model_validate(settings), SystemClock())

    with pytest.raises(ConfigError, match=r"work\.in names a reactive consumer and a trigger of a function"):
        asyncio.run(make())
