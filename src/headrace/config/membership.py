"""Group membership and fetching of a consumer: the same for reactive consumers and functions.

The table of consumer keys defines which client property each setting becomes.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.config.kafka import CONSUMER_KEYS, CONSUMER_ONLY
from headrace.config.section import Number, Section

Assignor = Literal["cooperative-sticky", "range", "roundrobin"]

_CLIENT_NAME: Final = {
    named.partition(".")[2]: key.client
    for key in CONSUMER_KEYS.values()
    for named in key.setting.split("`")[1:2]
    if named.startswith("consumer.") and key.client
}
"""Our setting to the client's property."""
_DECIDED_BY_BROKER: Final = {
    "session_timeout_seconds": "group.consumer.session.timeout.ms",
    "heartbeat_seconds": "group.consumer.heartbeat.interval.ms",
    "assignors": "group.remote.assignor",
}
_DEFAULT_PROPERTIES: Final = {"session.timeout.ms": 10_000, "partition.assignment.strategy": "cooperative-sticky"}
_HEARTBEAT_MS = 3000
_LIKELY_MAX_BYTES = 1_000_000
RECEIVE_BYTES: Final = 106_000_000
"""A broker takes requests up to 104,857,600 bytes by default (`socket.request.max.bytes`), so it has no larger batch.
The client would read a partition no further than a batch that it does not receive."""
_FETCH_HEAD_BYTES = 512


def _assignor(name: Any) -> Any:
    """Return the client's name of an assignor, which may be given by its Java class."""
    if name in ("sticky", "org.apache.kafka.clients.consumer.StickyAssignor", "StickyAssignor"):
        raise ValueError("is sticky, which the client does not have: write cooperative-sticky, which moves as little")
    short = str(name).rpartition(".")[2].removesuffix("Assignor")
    return {"Range": "range", "RoundRobin": "roundrobin", "CooperativeSticky": "cooperative-sticky"}.get(short, name)


def _one_way_to_rebalance(assignors: list[Assignor]) -> list[Assignor]:
    if "cooperative-sticky" in assignors and len(set(assignors)) > 1:
        raise ValueError(
            "mixes cooperative-sticky with assignors that stop every partition, which the client refuses: name one "
            "kind. Java's way to change over with such a list is not there: stop all members, then start them"
        )
    return assignors


def no_reset_by_itself(value: Any) -> Any:
    """Explain Java's other words for `auto.offset.reset`."""
    if value == "none" or str(value).startswith("by_duration"):
        raise ValueError(
            f"is {value}, which is not taken: write earliest or latest, for groups that have committed nothing. A "
            "committed offset is never reset, whatever is written here; on_gap says what happens when it is gone"
        )
    return value


class ConsumerConfig(Section):
    """Group membership and fetching; `kafka.properties` may set what is not set here."""

    group_protocol: Literal["classic", "consumer"] = "classic"
    """Kafka's `group.protocol`: `consumer` is KIP-848, where the broker decides on assignment and session."""
    assignors: Annotated[
        list[Annotated[Assignor, BeforeValidator(_assignor)]],
        Field(min_length=1),
        AfterValidator(_one_way_to_rebalance),
    ] = ["cooperative-sticky"]
    """Kafka's `partition.assignment.strategy`, by preference: `cooperative-sticky`, or `range` and `roundrobin`, which
    stop every partition of the group in each rebalance."""
    remote_assignor: Annotated[str, Field(pattern="^[A-Za-z0-9._-]*$")] = ""
    """Kafka's `group.remote.assignor`, for `group_protocol: consumer`: `uniform` or `range`; empty for the broker's."""
    instance_id: Annotated[str, Field(pattern="^[A-Za-z0-9._-]*$", max_length=249)] = ""
    """Kafka's `group.instance.id`: a member that returns under it within the session timeout keeps its partitions
    without a rebalance. Different in each process of the group; empty for none."""
    session_timeout_seconds: Annotated[float, Field(ge=0.01, le=3600), Number] = 10.0
    """Kafka's `session.timeout.ms`: how long a member may be silent before its partitions are reassigned."""
    heartbeat_seconds: Annotated[float, Field(ge=0.001, le=3600), Number] | None = None
    """Kafka's `heartbeat.interval.ms`; by default a third of the session timeout, 3 at most."""
    max_poll_interval_seconds: Annotated[float, Field(ge=1, le=86_400), Number] = 300.0
    """Kafka's `max.poll.interval.ms`: Headrace polls all the time, so this bounds how long a rebalance may take."""
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """Kafka's `isolation.level`: whether records of open and aborted transactions are withheld."""
    fetch_max_bytes: Annotated[int, Field(ge=1, le=2_147_483_135), Number] = 52_428_800
    """Kafka's `fetch.max.bytes`: one answer of a broker at most; one batch always fits."""
    partition_fetch_bytes: Annotated[int, Field(ge=1, le=1_000_000_000), Number] = 1_048_576
    """Kafka's `max.partition.fetch.bytes`: the part of one partition in it."""
    fetch_min_bytes: Annotated[
        int, Field(ge=1, le=100_000_000), Number, BeforeValidator(lambda n: 1 if n == -1 else n)
    ] = 1
    """Kafka's `fetch.min.bytes`: the bytes a broker waits for before it answers; light-4j's -1 is 1."""
    fetch_wait_seconds: Annotated[float, Field(ge=0, le=50), Number] = 0.5
    """Kafka's `fetch.max.wait.ms`: how long it waits for that."""
    fetch_retry_seconds: Annotated[float, Field(ge=0, le=300), Number] = 0.5
    """The client's `fetch.error.backoff.ms`: how long a partition is not fetched after a fetch of it has failed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.client_properties({})
        return self

    def client_properties(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return the client properties of a member: those of every client, overridden by what is set here.

        Raises:
            ValueError: The settings contradict each other.
        """
        chosen = {_CLIENT_NAME[name]: _to_client(name, getattr(self, name)) for name in self.model_fields_set}
        chosen = {name: value for name, value in chosen.items() if value not in ("", None)}
        found = {**_DEFAULT_PROPERTIES, **{n: v for n, v in shared.items() if n in CONSUMER_ONLY}, **chosen}
        if found.get("group.protocol", "classic") == "consumer":
            self._leave_to_broker(found)
        else:
            found.pop("group.remote.assignor", None)
            found.setdefault("heartbeat.interval.ms", min(_HEARTBEAT_MS, int(found["session.timeout.ms"]) // 3))
            _check_times(found)
        if (fetch := int(found.get("fetch.max.bytes", RECEIVE_BYTES // 2))) < _LIKELY_MAX_BYTES:
            found["message.max.bytes"] = max(1000, fetch)  # the client lifts fetch.max.bytes to this
        elif fetch > RECEIVE_BYTES - _FETCH_HEAD_BYTES:
            found["receive.message.max.bytes"] = fetch + _FETCH_HEAD_BYTES
        return found

    def warnings(self, shared: Mapping[str, Any], batch_bytes: int) -> list[str]:
        """Return what is allowed and probably a mistake, a sentence each."""
        found, properties = [], self.client_properties(shared)
        session = int(properties.get("session.timeout.ms", 0))
        beat = int(properties.get("heartbeat.interval.ms", 0))
        if session and beat * 3 > session:
            found.append(
                f"heartbeat_seconds is {beat / 1000:g}, more than a third of session_timeout_seconds, "
                f"{session / 1000:g}: two lost heartbeats end the membership; write {session / 3000:g} or less"
            )
        for name in ("fetch.max.bytes", "max.partition.fetch.bytes"):
            if int(properties.get(name, 0)) > batch_bytes:
                found.append(
                    f"{name} is {properties[name]}, above batch.max_bytes, {batch_bytes}: one fetch brings more than "
                    "one delivery takes, and the rest waits in memory; lower it, or raise batch.max_bytes"
                )
        brokers = {
            name for setting in _DECIDED_BY_BROKER if (name := _CLIENT_NAME[setting]) in shared
        } - properties.keys()
        found += [f"{name} has no effect with group.protocol consumer: the broker decides" for name in sorted(brokers)]
        return found

    def _leave_to_broker(self, found: dict[str, Any]) -> None:
        """Source: KIP-848; the client refuses these properties."""
        for setting, brokers in _DECIDED_BY_BROKER.items():
            if setting in self.model_fields_set:
                raise ValueError(
                    f"{setting} is set, and with group_protocol: consumer the broker decides that: omit it, and set "
                    f"{brokers} {'as remote_assignor' if setting == 'assignors' else 'on the brokers'}"
                )
            found.pop(_CLIENT_NAME[setting], None)


def _to_client(name: str, value: Any) -> Any:
    if name.endswith("_seconds") and value is not None:
        return round(value * 1000)
    return ",".join(value) if isinstance(value, list) else value


def _check_times(found: Mapping[str, Any]) -> None:
    """Source: Kafka's consumer configuration; the client's own check names neither the value nor the setting."""
    session, beat = int(found["session.timeout.ms"]), int(found["heartbeat.interval.ms"])
    poll = int(found.get("max.poll.interval.ms", 300_000))
    if beat >= session:
        raise ValueError(
            f"heartbeat_seconds is {beat / 1000:g} and session_timeout_seconds {session / 1000:g}, so a member is out "
            f"before its first heartbeat: write heartbeat_seconds: {session / 3000:g} or less"
        )
    if poll < session:
        raise ValueError(
            f"max_poll_interval_seconds is {poll / 1000:g}, less than session_timeout_seconds, {session / 1000:g}, "
            "which the client refuses: raise it"
        )
