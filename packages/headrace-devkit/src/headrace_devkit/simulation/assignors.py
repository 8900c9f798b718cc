"""How the leader of a classic group shares partitions: range, and sticky with two rounds.

Pure. Source: librdkafka, `rdkafka_range_assignor.c`, `rdkafka_sticky_assignor.c`, and
`rd_kafka_cooperative_protocol_adjust_assignment` in `rdkafka_cgrp.c`.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

Partition = tuple[str, int]
COOPERATIVE: Final = "cooperative-sticky"


class MemberTopics(NamedTuple):
    """What a member says to the leader."""

    topics: tuple[str, ...]
    owned: frozenset[Partition] = frozenset()
    generation: int = -1


def assign(
    protocol: str, members: Mapping[str, MemberTopics], counts: Mapping[str, int]
) -> dict[str, frozenset[Partition]]:
    """Return the partitions of each member; `counts` has those of each topic."""
    if protocol == COOPERATIVE:
        return _without_moving(_sticky(members, counts), members)
    return _range(members, counts)


def _range(members: Mapping[str, MemberTopics], counts: Mapping[str, int]) -> dict[str, frozenset[Partition]]:
    found: dict[str, set[Partition]] = {member: set() for member in members}
    for topic, count in sorted(counts.items()):
        readers = sorted(member for member, own in members.items() if topic in own.topics)
        first = 0
        for index, member in enumerate(readers):
            size = count // len(readers) + (index < count % len(readers))
            found[member] |= {(topic, number) for number in range(first, first + size)}
            first += size
    return {member: frozenset(partitions) for member, partitions in found.items()}


def _sticky(members: Mapping[str, MemberTopics], counts: Mapping[str, int]) -> dict[str, list[Partition]]:
    partitions = [(topic, number) for topic, count in sorted(counts.items()) for number in range(count)]
    newest = max((own.generation for own in members.values()), default=-1)
    found: dict[str, list[Partition]] = {}
    taken: set[Partition] = set()
    for member in sorted(members, key=lambda one: (-members[one].generation, one)):
        own = members[member]
        valid = own.owned & set(partitions) - taken if own.generation in (newest, newest - 1) else frozenset()
        found[member] = sorted(p for p in valid if p[0] in own.topics)
        taken |= set(found[member])
    for partition in partitions:
        readers = [member for member in sorted(members) if partition[0] in members[member].topics]
        if partition not in taken and readers:
            found[min(readers, key=lambda one: len(found[one]))].append(partition)
    moved = True
    while moved:
        moved = False
        for partition in partitions:
            owner = next((member for member in found if partition in found[member]), None)
            readers = [member for member in sorted(members) if partition[0] in members[member].topics]
            if owner is None or not readers:
                continue
            fewest = min(readers, key=lambda one: len(found[one]))
            if len(found[owner]) > len(found[fewest]) + 1:
                found[owner].remove(partition)
                found[fewest].append(partition)
                moved = True
    return found


def _without_moving(
    target: Mapping[str, list[Partition]], members: Mapping[str, MemberTopics]
) -> dict[str, frozenset[Partition]]:
    """Leave out what another member still owns: it is assigned in the round after that one has given it up."""
    owner = {partition: member for member, own in members.items() for partition in own.owned}
    assigned = {partition for kept in target.values() for partition in kept}
    found = {member: {p for p in kept if owner.get(p, member) == member} for member, kept in target.items()}
    for partition, member in owner.items():
        if partition not in assigned:
            found[member].add(partition)  # of a topic that the leader does not know
    return {member: frozenset(partitions) for member, partitions in found.items()}
