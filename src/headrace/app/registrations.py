"""Registered consumers in one process: made like those of the file, each on its own, and gone without a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from headrace.app.control_room import Controls
from headrace.app.ways_in import Surroundings, WaysIn
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.config.topic_patterns import fits_any
from headrace.control.registrations import House, Reader, Registration, Registrations
from headrace.functions.spec import FunctionSpec
from headrace.kafka import OwnTopics
from headrace.lifecycle import Lodgers, Lodging, Service
from headrace.web.application import Routes
from headrace.web.routes.registrations import RegistrationRoom, registration_routes


class RegisteredConsumers:
    """The services that registrations need, and what binds them to the rest of the process."""

    def __init__(self, process: Surroundings, ways_in: WaysIn, controls: Controls) -> None:
        """Make them; nothing is started."""
        config = process.config
        self._process = process
        self._ways_in = ways_in
        self._steering = controls.steering
        self._lodgers = Lodgers("reactive", process.clock, config.drain_seconds)
        house = House(
            config.registrations,
            config.kafka.properties,
            {one.name for one in ways_in.steered},
            readers_of(config, ways_in.functions),
            self._is_taken,
        )
        # A hold goes with its registration; what is steered no longer does not begin again while it drains.
        forget = controls.steering.remove
        self._registrations = Registrations(controls.table, house, process.clock, self._settle, forget)
        self.services: Sequence[Service] = [self._lodgers, self._registrations]
        """Downstream first; after the table and the producers."""
        room = RegistrationRoom(self._registrations, self._lodgers.readiness_of, controls.room.note)
        self.routes: Routes = registration_routes(room, config.http)

    def _is_taken(self, topic: str) -> bool:
        return topic.startswith("_") or bool(self._ways_in.internal.kind_of(topic))

    def _settle(self, wanted: Mapping[str, Registration]) -> None:
        self._ways_in.internal.register(one.settings for one in wanted.values() if one.settings)
        self._lodgers.settle({name: self._lodging(one) for name, one in wanted.items()})

    def _lodging(self, one: Registration) -> Lodging:
        made: list[_Room] = []

        def make() -> Sequence[Service]:
            room = _Room(self._process, one, self._is_taken)
            made.append(room)
            for steered in room.steered:
                self._steering.add(dataclasses.replace(steered, owner=one.owner))
            self._ways_in.targets.update(room.targets)
            for name, consumer in room.letter_consumers.items():
                self._ways_in.letter_consumers[name] = consumer._replace(owner=one.owner)
            for group, topics in room.groups.items():
                self._ways_in.groups.setdefault(group, []).extend(topics)
            name = f"reactive {one.name} own topics"
            topics_first = OwnTopics(room.admin, room.wanted_topics, room.clock, name, room.fits)
            return [topics_first, *room.services]

        def leave() -> None:
            for room in made:
                self._leave(one, room)
            made.clear()

        return Lodging(one.version, make, leave)

    def _leave(self, one: Registration, room: _Room) -> None:
        self._steering.remove(one.name)
        self._ways_in.targets.pop(("consumer", one.name), None)
        self._ways_in.letter_consumers.pop(one.name, None)
        watched = self._ways_in.groups
        for group, topics in room.groups.items():
            for topic in topics:
                watched[group].remove(topic)
            if not watched[group]:
                del watched[group]  # nobody else of this process is in it
        self._process.metrics.forget_deliveries("reactive", one.name)


class _Room(WaysIn):
    """The way in of one registration, beside those of the file."""

    def __init__(self, process: Surroundings, one: Registration, is_ours: Callable[[str], bool]) -> None:
        self._one = one
        self._is_ours = is_ours
        alone = {"reactive_consumers": {one.name: one.settings}, "functions": [], "pipelines": []}
        super().__init__(process, process.config.model_copy(update=alone))

    def _fits(self, reactive: ReactiveConsumerConfig) -> Callable[[str], bool] | None:
        if not reactive.topic_patterns:
            return None
        fits = fits_any(reactive.topic_patterns)
        return lambda topic: fits(topic) and not self._is_ours(topic) and self._one.may_read(topic)


def readers_of(config: HeadraceConfig, functions: Sequence[FunctionSpec]) -> list[Reader]:
    """Return who reads what in which group, as the file says."""
    found = [
        Reader(
            f"reactive_consumers.{name}",
            one.group,
            frozenset((*one.topics, *one.retry.tier_topics(one.group))),
            bool(one.topic_patterns),
        )
        for name, one in config.reactive_consumers.items()
    ]
    triggers = [(spec, trigger) for spec in functions for trigger in spec.triggers]
    return found + [
        Reader(f"function {spec.name}.{trigger.name}", trigger.group, frozenset(trigger.topics))
        for spec, trigger in triggers
    ]
