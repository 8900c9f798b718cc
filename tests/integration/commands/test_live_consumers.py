"""A consumer whose settings in the file change while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import yaml

from headrace_devkit.testing import MakeTopic, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario


def test_changed_settings_of_the_file_restart_their_consumer_only(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Records are delivered once, the later ones to the new backend; what needs a restart changes nothing."""
    first, other, group = topic(), topic(), f"live-{time.time_ns()}"
    second = RecordingBackend()
    second.start()
    try:
        consumers = {
            name: {"topics": [read], "group": f"{group}-{name}", "backend": {"url": backend.url}}
            for name, read in (("one", first), ("two", other))
        }
        process = headrace({**site.config, "reactive_consumers": consumers})
        file = next(process._folder.glob("headrace.yaml"))

        def reload(change: Callable[[Any], object]) -> Any:
            config = yaml.safe_load(file.read_text())
            change(config["reactive_consumers"]["one"])
            file.write_text(yaml.safe_dump(config))
            return site.ask(f"{process.url}/adm/modules", ["reactive_consumers"]).body

        site.write_json(first, *range(20))
        backend.wait_for(lambda b: b.accepted_records == 20, 20)
        moved = reload(lambda one: one["backend"].update(url=second.url))
        assert moved["reloaded"] == ["reactive_consumers"], moved
        for name in (first, other):
            site.write_json(name, *range(20))
        second.wait_for(lambda b: b.accepted_records == 20, 20)
        backend.wait_for(lambda b: b.accepted_records == 40, 20)
        refused = reload(lambda one: one.update(group="another"))["failed"]["reactive_consumers"]
        assert "reactive_consumers.one: a change of group needs a restart" in refused
        site.wait_committed(f"{group}-one", first, 40)
        assert (backend.accepted_records, second.accepted_records) == (40, 20)
    finally:
        second.stop()
