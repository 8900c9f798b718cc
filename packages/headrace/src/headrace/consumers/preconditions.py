"""The preconditions of the guarantees: judges what Kafka reports about brokers, topics and groups, without I/O."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from headrace.kafka import TopicInfo

State = Literal["ok", "warning", "failing"]

_REPLICAS = 3
_MIN_IN_SYNC = 2
_DAY_MS = 86_400_000
_DEAD_LETTERS_MS = 7 * _DAY_MS
_SERVERS = 2
_HOURS_MS = 3_600_000


class Finding(NamedTuple):
    """The state of one precondition, and what to do if it fails."""

    about: str
    check: str
    state: State
    found: str
    advice: str = ""


class Topic(NamedTuple):
    """A topic with its effective configuration by Kafka's names."""

    info: TopicInfo
    configs: Mapping[str, str]

    @property
    def retention_ms(self) -> int:
        """How long a record is kept; -1 for no limit."""
        deletes = "delete" in self.configs.get("cleanup.policy", "delete")
        return int(self.configs.get("retention.ms", -1)) if deletes else -1


class TopicRequirement(NamedTuple):
    """The topics that one reactive consumer, function or table reads and writes on one cluster."""

    reader: str
    """Its name for people."""
    group: str
    topics: Collection[str]
    """Topics it names."""
    matches: Callable[[str], bool] | None = None
    """Whether its patterns match a topic; None without patterns."""
    dead_letter_topic: Callable[[str], str] | None = None
    """Returns the dead letter topic of a topic; None if dead letters are off."""
    retry_topics: Collection[str] = ()
    """Its retry group reads them; a missing one is created, or writing to it fails with that error."""
    judge: Callable[[Topic], Finding] | None = None
    """Judges each of them for a reader without a group, of which no offsets are checked."""


ONE_BROKER = Finding("cluster", "reachable", "ok", "1 broker")
"""The finding of a cluster of one broker."""
_REPLICATION = ("bootstrap servers", "replication factor", "min.insync.replicas")


def summarize(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; on a cluster of one broker, replace those about replication by one."""
    if ONE_BROKER not in findings:
        return list(findings)
    others = [one for one in findings if one.check not in _REPLICATION]
    advice = "each record has one copy, which is lost with this broker: use it for development only"
    return [Finding("cluster", "number of brokers", "failing", "1", advice), *others]


def judge_brokers(count: int, missing: Sequence[int]) -> Finding:
    """Judge the brokers in the cluster now, and those that are missing from it."""
    if not missing:
        return ONE_BROKER if count == 1 else ONE_BROKER._replace(found=f"{count} brokers")
    named = "broker {} is" if len(missing) == 1 else "brokers {} are"
    found = f"{count} of {count + len(missing)}: {named.format(', '.join(map(str, missing)))} missing"
    advice = "records have fewer copies: start it again, or move its replicas to others (kafka-reassign-partitions)"
    return Finding("cluster", "number of brokers", "warning", found, advice)


def judge_servers(servers: str) -> Finding:
    """Judge the list of bootstrap servers."""
    count = len(servers.split(","))
    state: State = "ok" if count >= _SERVERS else "warning"
    advice = "list at least two in kafka.bootstrap_servers: with one, nothing starts while that broker is down"
    return judged("cluster", "bootstrap servers", state, str(count), advice)


def judge_topic(topic: Topic) -> Iterator[Finding]:
    """Judge whether an acknowledged record of a topic survives the loss of a broker."""
    about, configs, info = f"topic {topic.info.name}", topic.configs, topic.info
    replicas, min_isr = info.replication_factor, int(configs.get("min.insync.replicas", 1))
    alter = f"headrace topics alter {info.name} --set"
    yield judged(
        about,
        "replication factor",
        "ok" if replicas >= _REPLICAS else "failing",
        str(replicas),
        f"give it {_REPLICAS} replicas (kafka-reassign-partitions): with {replicas} a record may be on one broker only",
    )
    state: State = "ok"
    advice = ""
    if min_isr < _MIN_IN_SYNC:
        state = "failing"
        advice = f"{alter} min.insync.replicas={_MIN_IN_SYNC}: acks=all waits for that many"
    elif min_isr >= replicas:
        state = "warning"
        advice = "add a replica: a write needs every replica, so it fails while any broker is down"
    yield judged(about, "min.insync.replicas", state, str(min_isr), advice)
    unclean = configs.get("unclean.leader.election.enable", "false") == "true"
    yield judged(
        about,
        "unclean leader election",
        "failing" if unclean else "ok",
        "on" if unclean else "off",
        f"{alter} unclean.leader.election.enable=false: a replica without acknowledged records may become leader",
    )
    behind = [part.partition for part in info.partitions if len(part.in_sync) < len(part.replicas)]
    if behind:
        text = f"{len(behind)} partitions have replicas that are behind"
        yield Finding(about, "in-sync replicas", "warning", text, f"see headrace topics describe {info.name}")


def judge_source(topic: Topic, offsets_retention_ms: int | None, group: str) -> Iterator[Finding]:
    """Judge whether the records of a topic and the offsets of its group, if that is known, outlive a downtime."""
    name, kept = topic.info.name, topic.retention_ms
    yield judged(
        f"topic {name}",
        "retention",
        "ok" if kept < 0 or kept >= _DAY_MS else "failing",
        hours(kept),
        f"headrace topics alter {name} --set retention.ms={_DEAD_LETTERS_MS}: older records are lost",
    )
    if int(topic.configs.get("retention.bytes", -1)) > 0:
        size = topic.configs["retention.bytes"]
        yield Finding(
            f"topic {name}", "retention.bytes", "warning", size, "larger partitions lose records, also unread ones"
        )
    if offsets_retention_ms is None:
        return
    required_ms = _DEAD_LETTERS_MS if kept < 0 else min(kept, _DEAD_LETTERS_MS)
    yield judged(
        f"group {group}",
        f"offsets.retention.minutes, {name}",
        "ok" if offsets_retention_ms >= required_ms else "warning",
        hours(offsets_retention_ms),
        f"set it to {required_ms // 60_000} on the brokers: a group that is down for longer loses its offsets, and "
        "starts from the beginning",
    )


def judge_dead_letters(dead_letters: Topic, source: Topic) -> Iterator[Finding]:
    """Judge whether dead letters are kept long enough."""
    name, kept = dead_letters.info.name, dead_letters.retention_ms
    required_ms = _DEAD_LETTERS_MS if source.retention_ms < 0 else max(_DEAD_LETTERS_MS, source.retention_ms)
    yield judged(
        f"topic {name}",
        "retention of dead letters",
        "ok" if kept < 0 or kept >= required_ms else "warning",
        hours(kept),
        f"headrace topics alter {name} --set retention.ms={required_ms}: dead letters expire before "
        "the records of their origin",
    )
    if "compact" in dead_letters.configs.get("cleanup.policy", ""):
        yield Finding(
            f"topic {name}",
            "cleanup.policy",
            "failing",
            dead_letters.configs["cleanup.policy"],
            f"headrace topics alter {name} --set cleanup.policy=delete: dead letters of one key replace each other",
        )


def judged(about: str, check: str, state: State, found: str, advice: str) -> Finding:
    """Return a finding, with the advice only if there is something to do."""
    return Finding(about, check, state, found, "" if state == "ok" else advice)


def hours(milliseconds: int) -> str:
    """Return a time that a topic keeps records for people."""
    return "unlimited" if milliseconds < 0 else f"{milliseconds / _HOURS_MS:g} h"
