"""The coordinators' state machines: what a member is told, and which commits count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError

from headrace_devkit.simulation.assignors import COOPERATIVE, MemberTopics, assign
from headrace_devkit.simulation.classic_group import ClassicGroup, JoinRequest
from headrace_devkit.simulation.consumer_group import ConsumerGroup, Heartbeat, assign_uniformly
from headrace_devkit.simulation.offsets import CommittedOffset, OffsetsOfGroups

ALL = frozenset(("t", number) for number in range(4))


class Classic:
    """A classic group, and the last response to each member."""

    def __init__(self) -> None:
        self.numbers = 0
        self.group = ClassicGroup(self._new_id, 0.0)
        self.said: dict[str, list[Any]] = {}

    def _new_id(self, name: str) -> str:
        self.numbers += 1
        return f"{name}{self.numbers}"

    def heard(self, name: str) -> Callable[[Any], object]:
        return self.said.setdefault(name, []).append

    def join(self, name: str, member_id: str = "", now: float = 0.0, **more: Any) -> None:
        request = JoinRequest(member_id, name, 3.0, 10.0, (("range", MemberTopics(("t",))),), **more)
        self.group.join(request, self.heard(name), now)

    def sync(self, name: str, member_id: str, now: float = 0.0) -> None:
        partitions = dict.fromkeys(self.group.members, ALL)
        self.group.sync(member_id, self.group.generation, partitions, self.heard(name), now)

    def one(self) -> str:
        """Make a stable group of one member."""
        self.join("a")
        member_id = str(self.said["a"][-1].member_id)
        self.join("a", member_id)
        self.group.expire(0.0)
        self.sync("a", member_id)
        return member_id


def test_a_member_joins_by_the_id_that_it_is_given() -> None:
    scene = Classic()
    member_id = scene.one()
    assert [response.error for response in scene.said["a"]] == [KafkaError.MEMBER_ID_REQUIRED, 0, 0]
    assert (scene.group.state, scene.group.leader, scene.said["a"][-1].assignment) == ("stable", member_id, ALL)


def test_a_join_waits_for_the_members_and_drops_those_that_do_not_come() -> None:
    scene = Classic()
    first = scene.one()
    scene.join("b")
    second = scene.said["b"][-1].member_id
    scene.join("b", second, now=1.0)
    assert scene.group.heartbeat(first, 1, 1.0) == KafkaError.REBALANCE_IN_PROGRESS
    assert scene.group.check_commit(first, 1, 1.0) == 0  # the old generation may still commit
    for now in (2.0, 4.5, 6.0):
        scene.group.heartbeat(first, 1, now)
        scene.group.expire(now)
    assert len(scene.said["b"]) == 1
    scene.group.heartbeat(first, 1, 8.0)
    scene.group.expire(11.0)
    assert (scene.group.generation, scene.said["b"][-1].leader) == (2, second)
    assert scene.group.check_commit(second, 2, 11.0) == KafkaError.REBALANCE_IN_PROGRESS
    assert scene.group.check_commit(first, 1, 11.0) == KafkaError.UNKNOWN_MEMBER_ID


def test_a_session_ends_and_the_generation_with_it() -> None:
    scene = Classic()
    member_id = scene.one()
    assert scene.group.next_deadline == 3.0
    scene.group.expire(3.0)
    scene.group.expire(3.0)
    assert (scene.group.state, scene.group.members) == ("empty", {})
    assert scene.group.check_commit(member_id, 1, 3.0) == KafkaError.UNKNOWN_MEMBER_ID
    assert scene.group.check_commit("", -1, 3.0) == 0


def test_a_static_member_comes_back_without_a_rebalance_and_fences_the_old() -> None:
    scene = Classic()
    scene.join("a", instance_id="i")
    scene.group.expire(0.0)
    old = scene.said["a"][-1].member_id
    scene.sync("a", old)
    scene.join("b", now=1.0, instance_id="i")
    new = scene.said["b"][-1]
    assert (new.error, new.generation, new.members, scene.group.state) == (0, 1, None, "stable")
    assert scene.group.heartbeat(old, 1, 1.0, "i") == KafkaError.FENCED_INSTANCE_ID
    scene.sync("b", new.member_id, 1.0)
    assert scene.said["b"][-1].assignment == ALL


def test_another_coordinator_knows_the_last_stable_generation() -> None:
    scene = Classic()
    member_id = scene.one()
    scene.join("b")
    scene.join("b", scene.said["b"][-1].member_id)
    scene.group.moved(5.0)
    assert (scene.group.state, list(scene.group.members)) == ("stable", [member_id])
    assert scene.group.heartbeat(member_id, 1, 6.0) == 0


def test_the_cooperative_leader_moves_a_partition_in_two_rounds() -> None:
    members = {"a": MemberTopics(("t",), ALL, 1), "b": MemberTopics(("t",))}
    first = assign(COOPERATIVE, members, {"t": 4})
    assert (len(first["a"]), first["b"]) == (2, frozenset())
    members = {"a": MemberTopics(("t",), first["a"], 2), "b": MemberTopics(("t",), frozenset(), 2)}
    second = assign(COOPERATIVE, members, {"t": 4})
    assert (second["a"], second["b"]) == (first["a"], ALL - first["a"])


def beat(group: ConsumerGroup, member: str, epoch: int, owned: Any = None, now: float = 0.0) -> Any:
    topics = ("t",) if epoch == 0 else None
    return group.heartbeat(Heartbeat(member, epoch, None, 10.0, topics, owned), now)


def new_group() -> ConsumerGroup:
    return ConsumerGroup(lambda topic: 4 * (topic == "t"), session_seconds=3.0)


def test_a_partition_is_given_up_before_another_member_gets_it() -> None:
    group = new_group()
    assert beat(group, "a", 0, frozenset()).assignment == ALL
    assert beat(group, "b", 0, frozenset()).assignment == frozenset()
    told = beat(group, "a", 1)
    assert (told.epoch, len(told.assignment)) == (1, 2)
    assert beat(group, "b", 2).assignment is None
    assert beat(group, "a", 1, told.assignment).epoch == 2
    assert beat(group, "b", 2).assignment == ALL - told.assignment
    assert group.state == "stable"


def test_an_earlier_epoch_commits_only_what_the_member_has_kept() -> None:
    group = new_group()
    beat(group, "a", 0, frozenset())
    beat(group, "b", 0, frozenset())
    kept = beat(group, "a", 1).assignment
    beat(group, "a", 1, kept)
    found = [group.check_commit("a", *of) for of in ((2, ALL), (1, kept), (1, ALL), (3, kept), (0, kept))]
    stale = KafkaError.STALE_MEMBER_EPOCH
    assert found == [0, 0, stale, stale, stale]
    assert group.check_commit("c", 1, kept) == KafkaError.UNKNOWN_MEMBER_ID


def test_who_does_not_give_up_in_time_is_fenced() -> None:
    group = new_group()
    beat(group, "a", 0, frozenset())
    beat(group, "b", 0, frozenset())
    for now in (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0):
        beat(group, "b", 2, now=now)
        told = beat(group, "a", 1, ALL, now)
        group.expire(now)
    assert told.error == KafkaError.UNKNOWN_MEMBER_ID
    assert group.members["b"].assigned == ALL


def test_partitions_are_shared_evenly_and_move_seldom() -> None:
    counts, alone = {"t": 5}, {"a": ("t",)}
    first = assign_uniformly(alone, counts, {})
    both = assign_uniformly({**alone, "b": ("t",)}, counts, first)
    assert sorted(map(len, both.values())) == [2, 3]
    assert both["a"] < first["a"]
    assert assign_uniformly({**alone, "b": ("t",)}, counts, both) == both


def test_offsets_of_a_transaction_count_when_it_is_committed() -> None:
    offsets = OffsetsOfGroups()
    for producer, offset in ((1, 3), (2, 5)):
        offsets.commit_later("g", producer, {("t", 0): CommittedOffset(offset)})
    offsets.end_transaction("g", 1, committed=False)
    assert (offsets.committed("g"), offsets.is_pending("g", ("t", 0))) == ({}, True)
    offsets.end_transaction("g", 2, committed=True)
    assert offsets.committed("g") == {("t", 0): CommittedOffset(5)}
    assert not offsets.is_pending("g", ("t", 0))
