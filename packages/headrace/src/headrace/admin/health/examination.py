"""Examines a cluster for the preconditions of the guarantees: for `headrace doctor`, and when a process starts."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from headrace.config.kafka import KafkaConfig
from headrace.consumers.preconditions import (
    Finding,
    Topic,
    TopicRequirement,
    judge_brokers,
    judge_dead_letters,
    judge_servers,
    judge_source,
    judge_topic,
    summarize,
)
from headrace.errors import EnvironmentProblem, HeadraceError, KafkaUnavailable, TopicNotFound
from headrace.kafka import Admin
from headrace.runtime import Clock, Readiness, Service

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 600.0
_SOON_SECONDS = 2.0
_DEFAULT_RETENTION_MINUTES = "10080"

Examine = Callable[[], Awaitable[Sequence[Finding]]]


async def examine(
    admin: Admin, required: Iterable[TopicRequirement], *, creates_topics: bool, dead_letters: Admin | None = None
) -> list[Finding]:
    """Return every precondition of these requirements once; `dead_letters` is the cluster of the dead letter topics.

    Without `dead_letters` they are on the same cluster.

    Raises:
        KafkaUnavailable: No broker responds.
    """
    examination = _Examination(admin, dead_letters or admin, creates_topics)
    return list(dict.fromkeys([judge_servers(admin.servers), *await examination.of(required)]))


def by_cluster(
    kafka: KafkaConfig, requirements: Iterable[tuple[KafkaConfig, TopicRequirement]]
) -> Sequence[tuple[KafkaConfig, list[TopicRequirement]]]:
    """Return requirements by cluster and login, those of `kafka` first."""
    found: list[tuple[KafkaConfig, list[TopicRequirement]]] = [(kafka, [])]
    for cluster, required in requirements:
        same = next((each for known, each in found if known.model_dump() == cluster.model_dump()), None)
        if same is None:
            found.append((cluster, same := []))
        same.append(required)
    return found


def examination(
    kafka: KafkaConfig, admin: Admin, requirements: Callable[[], Iterable[tuple[KafkaConfig, TopicRequirement]]]
) -> Examine:
    """Return the function that examines the clusters of requirements; `admin` is the one for `kafka`."""
    admins = [(kafka, admin)]

    def admin_of(cluster: KafkaConfig) -> Admin:
        known = next((each for other, each in admins if other is cluster), None)
        if known is None:
            admins.append((cluster, known := Admin(cluster)))
        return known

    async def run() -> list[Finding]:
        return [
            found
            for cluster, required in by_cluster(kafka, requirements())
            for found in await examine(
                admin_of(cluster), required, creates_topics=kafka.create_topics, dead_letters=admin
            )
        ]

    return run


class _Examination:
    def __init__(self, admin: Admin, dead_letters: Admin, creates_topics: bool) -> None:
        self._admin = admin
        self._dead_letters_admin = dead_letters
        self._creates_topics = creates_topics
        self._topics: dict[tuple[Admin, str], Topic | None] = {}

    async def of(self, required: Iterable[TopicRequirement]) -> list[Finding]:
        cluster = await self._admin.describe_cluster()
        found = [judge_brokers(cluster.brokers, cluster.missing)]
        kept_ms: int | None = 60_000 * int(cluster.configs.get("offsets.retention.minutes", _DEFAULT_RETENTION_MINUTES))
        if cluster.refused:
            kept_ms = None
            found.append(Finding("cluster", "configuration", "warning", "unknown", cluster.refused))
        known = [topic.name for topic in await self._admin.list_topics()]
        for each in required:
            if each.judge:
                for name in each.topics:
                    found += await self._judged(name, each.judge)
                continue
            for name in dict.fromkeys([*each.topics, *filter(each.matches or (lambda _: False), known)]):
                found += await self._source(name, each.group, each.dead_letter_topic, kept_ms)
            for name in filter(each.retry_topics.__contains__, known):
                found += await self._source(name, f"{each.group}.retry", None, kept_ms)
        return found

    async def _source(
        self, name: str, group: str, dead_letter_topic: Callable[[str], str] | None, kept_ms: int | None
    ) -> list[Finding]:
        source = await self._topic(self._admin, name)
        if source is None:
            return [_missing(name)]
        found = [*judge_topic(source), *judge_source(source, kept_ms, group)]
        if dead_letter_topic:
            found += await self._dead_letters(dead_letter_topic(name), source)
        return found

    async def _judged(self, name: str, judge: Callable[[Topic], Finding]) -> list[Finding]:
        source = await self._topic(self._admin, name)
        if source is None:
            return [_missing(name)]
        return [*judge_topic(source), judge(source)]

    async def _dead_letters(self, name: str, source: Topic) -> list[Finding]:
        if dead_letters := await self._topic(self._dead_letters_admin, name):
            return [*judge_topic(dead_letters), *judge_dead_letters(dead_letters, source)]
        if self._creates_topics:
            return [Finding(f"topic {name}", "exists", "ok", f"will be created like {source.info.name}")]
        advice = f"headrace topics create {name}, or set kafka.create_topics: true"
        return [Finding(f"topic {name}", "exists", "failing", "no", advice)]

    async def _topic(self, admin: Admin, name: str) -> Topic | None:
        if (admin, name) not in self._topics:
            try:
                info = await admin.describe_topic(name)
                self._topics[admin, name] = Topic(info, await admin.topic_configs(name))
            except TopicNotFound:
                self._topics[admin, name] = None
        return self._topics[admin, name]


def _missing(topic: str) -> Finding:
    advice = f"headrace topics create {topic}, with the required partitions and replicas"
    return Finding(f"topic {topic}", "exists", "failing", "no", advice)


async def require(examine_all: Examine) -> None:
    """Raise unless every precondition holds, as `durability: strict` requires.

    Raises:
        EnvironmentProblem: A precondition fails; the text names each of them, with advice.
        KafkaUnavailable: No broker responds.
    """
    failing = [one for one in await examine_all() if one.state == "failing"]
    if failing:
        text = "; ".join(f"{one.about}: {one.check} is {one.found}: {one.advice}" for one in failing)
        raise EnvironmentProblem(f"durability is strict, and {len(failing)} preconditions fail: {text}")


class Durability(Service):
    """Reports failing preconditions in the log and in the details of readiness; nothing stops."""

    def __init__(self, examine_all: Examine, clock: Clock) -> None:
        super().__init__("durability")
        self._examine = examine_all
        self._clock = clock
        self._found: list[Finding] = []

    def readiness(self) -> Readiness:
        texts = [f"{one.about}: {one.check} is {one.found}" for one in self._found]
        return Readiness(True, f"{'; '.join(texts)}: see headrace doctor" if texts else "")

    async def run(self) -> None:
        while True:
            pause = _AGAIN_SECONDS
            try:
                found = [one for one in summarize(await self._examine()) if one.state != "ok"]
            except KafkaUnavailable:
                pause = _SOON_SECONDS  # other services report it
            except HeadraceError as error:
                log.warning("failed to check durability, will retry: %s", error.description)
            else:
                for one in found:
                    if one not in self._found:
                        log.warning("%s: %s is %s: %s", one.about, one.check, one.found, one.advice)
                self._found = found
            await self._clock.sleep(pause)
