"""What the properties of a consumer's client decide, with librdkafka's defaults."""

from collections.abc import Mapping
from typing import Any

from headrace_devkit.simulation.fetcher import RESET_TO, FetchSettings
from headrace_devkit.simulation.group_member import GroupSettings


def fetch_settings(config: Mapping[str, Any]) -> FetchSettings:
    """Return how a client fetches."""
    return FetchSettings(
        wait_seconds=_seconds(config, "fetch.wait.max.ms", 500),
        queue_seconds=_seconds(config, "fetch.queue.backoff.ms", 1000),
        most_records=int(config.get("queued.min.messages", 100_000)),
        most_bytes=int(config.get("queued.max.messages.kbytes", 65_536)) * 1024,
        reports_end=config.get("enable.partition.eof", False) in (True, "true"),
        committed_only=config.get("isolation.level", "read_committed") == "read_committed",
        reset=RESET_TO[str(config.get("auto.offset.reset", "latest"))],
    )


def group_settings(config: Mapping[str, Any]) -> GroupSettings:
    """Return how a client is a member of its group."""
    names = str(config.get("partition.assignment.strategy", "range,roundrobin"))
    return GroupSettings(
        group=str(config["group.id"]),
        instance_id=config.get("group.instance.id"),
        client_id=str(config.get("client.id", "rdkafka")),
        session_seconds=_seconds(config, "session.timeout.ms", 45_000),
        heartbeat_seconds=_seconds(config, "heartbeat.interval.ms", 3000),
        poll_seconds=_seconds(config, "max.poll.interval.ms", 300_000),
        refresh_seconds=_seconds(config, "topic.metadata.refresh.interval.ms", 300_000),
        assignors=tuple(name.strip() for name in names.split(",")),
    )


def _seconds(config: Mapping[str, Any], name: str, default: float) -> float:
    return float(config.get(name, default)) / 1000
