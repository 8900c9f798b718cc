"""Group membership and fetching of a consumer: the same for reactive consumers and functions.

They are Kafka's own properties.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator

from headrace.config.kafka import CONSUMER_ONLY, MemberProperties
from headrace.config.section import Section

_STRATEGY: Final = "partition.assignment.strategy"
_ASSIGNORS: Final = {"Range": "range", "RoundRobin": "roundrobin", "CooperativeSticky": "cooperative-sticky"}
_DECIDED_BY_BROKER: Final = {
    "session.timeout.ms": "set group.consumer.session.timeout.ms on the brokers",
    "heartbeat.interval.ms": "set group.consumer.heartbeat.interval.ms on the brokers",
    _STRATEGY: "set group.remote.assignor",
}
_DEFAULT_PROPERTIES: Final = {"session.timeout.ms": 10_000, _STRATEGY: "cooperative-sticky"}
_NAMES: Final = {"group.instance.id": "[A-Za-z0-9._-]{0,249}", "group.remote.assignor": "[A-Za-z0-9._-]*"}
_HEARTBEAT_MS = 3000
_POLL_INTERVAL_MS = 60_000
"""A group waits this long for a member that has vanished. Polls wait for no user code, and at most 20 s for a drain."""
_LIKELY_MAX_BYTES = 1_000_000
RECEIVE_BYTES: Final = 106_000_000
"""A broker accepts requests up to 104,857,600 bytes by default (`socket.request.max.bytes`), so no batch is larger.
The client would stop reading a partition at a batch that is too large for it."""
_FETCH_HEAD_BYTES = 512


def _checked(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of a member with the client's names of assignors, which may be given by Java classes."""
    properties = {name: value for name, value in properties.items() if name not in _NAMES or value != ""}
    for name, form in _NAMES.items():
        if not re.fullmatch(form, str(properties.get(name, ""))):
            raise ValueError(f"{name} is {properties[name]}: use up to 249 letters, digits, dots, underscores, hyphens")
    if _STRATEGY not in properties:
        return properties
    written = [
        name.strip().rpartition(".")[2].removesuffix("Assignor") for name in str(properties[_STRATEGY]).split(",")
    ]
    names = [_ASSIGNORS.get(name, name) for name in written]
    unknown = [name for name in names if name not in _ASSIGNORS.values()]
    if "" in unknown:
        raise ValueError(f"{_STRATEGY} has an empty name: write cooperative-sticky, range or roundrobin, or remove it")
    if unknown:
        raise ValueError(
            f"{_STRATEGY} is {unknown[0]}, which the client does not support: write range, roundrobin, or "
            "cooperative-sticky, which moves as few partitions as sticky"
        )
    if "cooperative-sticky" in names and len(set(names)) > 1:
        raise ValueError(
            f"{_STRATEGY} mixes cooperative-sticky with eager assignors, which the client rejects: write one kind. "
            "To change the kind, stop all members, then start them"
        )
    return {**properties, _STRATEGY: ",".join(names)}


def no_reset_by_itself(value: Any) -> Any:
    """Explain Java's other words for `auto.offset.reset`."""
    if value == "none" or str(value).startswith("by_duration"):
        raise ValueError(
            f"is {value}, which is not supported: write earliest or latest, for groups that have committed nothing. "
            "A committed offset is never reset; on_gap decides what happens when the log no longer has it"
        )
    return value


class ConsumerConfig(Section):
    """Group membership and fetching of a consumer."""

    properties: Annotated[MemberProperties, AfterValidator(_checked)] = Field(default_factory=dict)
    """Kafka's consumer properties for membership and fetching, such as `session.timeout.ms`, `group.instance.id` and
    `isolation.level`, by their librdkafka names. They override `kafka.properties`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.client_properties({})
        return self

    @property
    def is_eager(self) -> bool:
        """Whether each rebalance stops every partition of the group."""
        return "cooperative-sticky" not in str(self.properties.get(_STRATEGY, "cooperative-sticky"))

    def client_properties(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return the client properties of a member: those of every client, overridden by what is set here.

        Raises:
            ValueError: The settings contradict each other.
        """
        shared = {name: value for name, value in shared.items() if name in CONSUMER_ONLY}
        found = {**_DEFAULT_PROPERTIES, **shared, **self.properties}
        if found.get("group.protocol", "classic") == "consumer":
            self._leave_to_broker(found)
        else:
            found.pop("group.remote.assignor", None)
            found.setdefault("heartbeat.interval.ms", min(_HEARTBEAT_MS, int(found["session.timeout.ms"]) // 3))
            found.setdefault("max.poll.interval.ms", max(_POLL_INTERVAL_MS, int(found["session.timeout.ms"])))
            _check_times(found)
        found.setdefault("max.poll.interval.ms", _POLL_INTERVAL_MS)
        if (fetch := int(found.get("fetch.max.bytes", RECEIVE_BYTES // 2))) < _LIKELY_MAX_BYTES:
            found["message.max.bytes"] = max(1000, fetch)  # the client lifts fetch.max.bytes to this
        elif fetch > RECEIVE_BYTES - _FETCH_HEAD_BYTES:
            found["receive.message.max.bytes"] = fetch + _FETCH_HEAD_BYTES
        return found

    def warnings(self, shared: Mapping[str, Any]) -> list[str]:
        """Return what is allowed and has no effect, a sentence each."""
        brokers = {name for name in _DECIDED_BY_BROKER if name in shared} - self.client_properties(shared).keys()
        return [f"{name} has no effect with group.protocol consumer: the broker decides" for name in sorted(brokers)]

    def _leave_to_broker(self, found: dict[str, Any]) -> None:
        """Source: KIP-848; the client rejects these properties."""
        for name, instead in _DECIDED_BY_BROKER.items():
            if name in self.properties:
                raise ValueError(
                    f"{name} is set, but with group.protocol: consumer the broker decides it: remove it, and {instead}"
                )
            found.pop(name, None)


def _check_times(found: Mapping[str, Any]) -> None:
    """Source: Kafka's consumer configuration; the client's own check names neither the value nor the setting."""
    session, beat = int(found["session.timeout.ms"]), int(found["heartbeat.interval.ms"])
    poll = int(found["max.poll.interval.ms"])
    if beat >= session:
        raise ValueError(
            f"heartbeat.interval.ms is {beat} and session.timeout.ms {session}, so a session times out before the "
            f"first heartbeat: write heartbeat.interval.ms: {session // 3} or less"
        )
    if poll < session:
        raise ValueError(
            f"max.poll.interval.ms is {poll}, less than session.timeout.ms ({session}), which the client rejects: "
            "raise it"
        )
