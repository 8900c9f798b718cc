"""Control of what runs."""

from __future__ import annotations

from headrace.config.section import Section, TopicName


class ControlConfig(Section):
    """How what runs is steered: pauses, seeks, skips, changed settings, jobs, registrations."""

    topic: TopicName = "_headrace-control"
    """Compacted topic that holds them. Processes that share it are one deployment, and each does its part."""
