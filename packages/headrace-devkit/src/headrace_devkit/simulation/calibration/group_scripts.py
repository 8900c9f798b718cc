"""Scripts about groups: who has which partitions, when a member loses them, and which commits count."""

from typing import Any

from headrace_devkit.simulation.calibration.scripts import script
from headrace_devkit.simulation.calibration.stages import SESSION_SECONDS, Stage

PAST_SESSION_SECONDS = SESSION_SECONDS + 2.0


@script()
def two_members_share(stage: Stage) -> None:
    stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    second = stage.member("b")
    stage.settled(first, second)
    second.tell("close")
    stage.closed(second)
    stage.settled(first)


@script()
def a_killed_member_is_replaced(stage: Stage) -> None:
    stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    second = stage.member("b")
    stage.settled(first, second)
    second.kill()
    stage.until(lambda: len(first.owned) == 4, "a has all")
    stage.sleep(2)


@script()
def a_pause_past_the_session_loses_all(stage: Stage) -> None:
    topic = stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    second = stage.member("b")
    stage.settled(first, second)
    second.stop()
    stage.until(lambda: len(first.owned) == 4, "a has all")
    first.tell("commit", [[topic, 0, 7]])
    stage.until(lambda: first.count("commit"), "a commits")
    second.go_on()
    stage.until(lambda: second.count("lost"), "b has lost its partitions")
    stage.settled(first, second)
    stage.checkpoint("after")


@script()
def a_held_poll_past_its_interval_leaves(stage: Stage) -> None:
    stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    second = stage.member("b", max_poll_interval_ms=4000)
    stage.settled(first, second)
    second.tell("hold", 10)
    stage.until(lambda: len(first.owned) == 4, "a has all")
    stage.until(lambda: second.count("held"), "b polls again")
    stage.settled(first, second)


@script()
def a_commit_in_the_revoke_counts(stage: Stage) -> None:
    topic = stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    first.tell("on_revoke", 0, ["commit", [[topic, 0, 3], [topic, 1, 3], [topic, 2, 3], [topic, 3, 3]]])
    stage.sleep(0.2)
    second = stage.member("b")
    stage.settled(first, second)
    stage.checkpoint("after")


@script()
def a_commit_of_what_it_no_longer_owns_is_accepted(stage: Stage) -> None:
    topic = stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    second = stage.member("b")
    stage.settled(first, second)
    first.tell("commit", [[topic, number, 5] for number in range(4)])
    stage.until(lambda: first.count("commit"), "a commits")
    stage.checkpoint("after")


@script()
def a_commit_after_the_session_is_refused(stage: Stage) -> None:
    topic = stage.topic(2)
    first = stage.member("a")
    stage.settled(first)
    first.tell("on_revoke", 0)
    first.stop()
    stage.sleep(PAST_SESSION_SECONDS)
    first.tell("commit", [[topic, 0, 5]])
    stage.sleep(0.2)
    first.go_on()
    stage.until(lambda: first.count("commit"), "a's commit is answered")
    stage.until(lambda: first.count("lost"), "a has lost its partitions")
    stage.settled(first)
    stage.checkpoint("after")


@script()
def a_static_member_comes_back(stage: Stage) -> None:
    stage.topic(4)
    first = stage.member("a", group_instance_id="one")
    stage.settled(first)
    second = stage.member("b", group_instance_id="two")
    stage.settled(first, second)
    second.tell("close")
    stage.closed(second)
    stage.sleep(1)
    third = stage.member("c", group_instance_id="two")
    stage.settled(first, third)


@script()
def a_static_member_that_stays_away_is_replaced(stage: Stage) -> None:
    stage.topic(4)
    first = stage.member("a", group_instance_id="one")
    stage.settled(first)
    second = stage.member("b", group_instance_id="two")
    stage.settled(first, second)
    second.tell("close")
    stage.until(lambda: len(first.owned) == 4, "a has all")
    stage.sleep(1)


@script()
def a_static_member_twice(stage: Stage) -> None:
    stage.topic(2)
    first = stage.member("a", group_instance_id="one")
    stage.settled(first)
    second = stage.member("b", group_instance_id="one")
    stage.until(lambda: first.count("error") or second.count("error"), "one of them is fenced")
    stage.sleep(4)


@script()
def a_topic_gains_partitions(stage: Stage) -> None:
    topic = stage.topic(2)
    first = stage.member("a")
    stage.settled(first)
    second = stage.member("b")
    stage.settled(first, second)
    stage.add_partitions(topic, 4)
    stage.settled(first, second)


@script(brokers=3)
def the_coordinator_stops(stage: Stage) -> None:
    topic = stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    second = stage.member("b")
    stage.settled(first, second)
    first.tell("commit", [[topic, 0, 3]])
    stage.until(lambda: first.count("commit"), "a commits")
    start = stage.stop_broker("coordinator", topic)
    first.tell("commit", [[topic, 0, 4]])
    stage.until(lambda: first.count("commit") == 2, "a commits again")
    stage.sleep(5)
    start()
    stage.sleep(3)
    stage.checkpoint("after")


@script()
def unsubscribe_and_subscribe(stage: Stage) -> None:
    topic = stage.topic(2)
    first = stage.member("a")
    stage.settled(first)
    first.tell("unsubscribe")
    stage.until(lambda: first.count("revoke"), "a has none")
    stage.sleep(1)
    first.tell("subscribe", [topic])
    stage.settled(first)


@script()
def another_topic_is_added(stage: Stage) -> None:
    topic = stage.topic(2)
    first = stage.member("a")
    stage.settled(first)
    other = stage.topic(2)
    first.tell("subscribe", [topic, other])
    stage.settled(first)
    first.tell("subscribe", [other])
    stage.topics.remove(topic)
    stage.settled(first)
    stage.topics.insert(0, topic)


@script()
def a_slow_revoke_holds_the_others(stage: Stage) -> None:
    topic = stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    first.tell("on_revoke", 4, ["commit", [[topic, 0, 1]]])
    stage.sleep(0.2)
    second = stage.member("b")
    stage.settled(first, second)
    stage.checkpoint("after")


def _three_of_which_one_revokes_slowly(stage: Stage, seconds: float) -> tuple[Any, Any]:
    """Return a member that waits for the next generation, and the one that it waits for."""
    stage.topic(6)
    first = stage.member("a")
    stage.settled(first)
    slow = stage.member("c")
    stage.settled(first, slow)
    slow.tell("on_revoke", seconds)
    stage.sleep(0.3)
    stage.member("b")
    stage.until(lambda: slow.count("revoke") and len(first.owned) == 2, "c revokes, and a has done so")
    stage.sleep(1)
    return first, slow


@script()
def a_commit_waits_behind_a_join(stage: Stage) -> None:
    first, slow = _three_of_which_one_revokes_slowly(stage, 5)
    first.tell("commit", [[stage.topics[0], 0, 5]])
    first.tell("commit", [[stage.topics[0], 0, 6]])
    stage.until(lambda: first.count("commit") == 2, "a's commits are answered")
    stage.settled(*stage.members)
    slow.tell("on_revoke", 0)
    stage.checkpoint("after")


@script()
def a_pause_while_a_join_waits(stage: Stage) -> None:
    first, slow = _three_of_which_one_revokes_slowly(stage, 4)
    first.stop()
    stage.sleep(4 + PAST_SESSION_SECONDS)
    slow.tell("on_revoke", 0)
    others = [member for member in stage.members if member is not first]
    stage.until(lambda: sum(len(member.owned) for member in others) == 6, "the others have all")
    first.go_on()
    stage.until(lambda: first.count("lost"), "a has lost its partitions")
    stage.settled(*stage.members)


@script()
def an_asynchronous_commit_in_the_revoke(stage: Stage) -> None:
    topic = stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    first.tell("on_revoke", 0, ["commit_async", [[topic, number, 3] for number in range(4)]])
    stage.sleep(0.2)
    second = stage.member("b")
    stage.settled(first, second)
    stage.checkpoint("after")


@script()
def a_member_is_killed_in_its_revoke(stage: Stage) -> None:
    stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    first.tell("on_revoke", 30)
    stage.sleep(0.2)
    second = stage.member("b")
    stage.until(lambda: first.count("revoke"), "a revokes")
    first.kill()
    stage.settled(second)


@script()
def a_revoke_longer_than_the_rebalance(stage: Stage) -> None:
    topic = stage.topic(4)
    first = stage.member("a", max_poll_interval_ms=4000)
    stage.settled(first)
    first.tell("on_revoke", 8, ["commit", [[topic, 0, 1]]])
    stage.sleep(0.2)
    second = stage.member("b", max_poll_interval_ms=4000)
    stage.until(lambda: first.count("revoke"), "a revokes")
    stage.sleep(0.5)
    first.tell("on_revoke", 0)
    stage.until(lambda: first.count("assign") > 1 or first.count("lost"), "a continues")
    stage.settled(first, second)
    stage.checkpoint("after")


@script()
def three_members_one_after_the_other(stage: Stage) -> None:
    stage.topic(6)
    members = []
    for name in ("a", "b", "c"):
        members.append(stage.member(name))
        stage.settled(*members)
    for member in members[:2]:
        member.tell("close")
        stage.closed(member)
    stage.settled(members[2])


@script()
def a_static_member_does_not_poll(stage: Stage) -> None:
    stage.topic(4)
    first = stage.member("a", group_instance_id="one")
    stage.settled(first)
    second = stage.member("b", group_instance_id="two", max_poll_interval_ms=4000)
    stage.settled(first, second)
    second.tell("hold", 10)
    stage.until(lambda: second.count("held"), "b polls again")
    stage.settled(first, second)


@script(exact=True)
def what_was_fetched_is_dropped_by_a_rebalance(stage: Stage) -> None:
    topic = stage.topic(2)
    first = stage.member("a")
    stage.settled(first)
    first.tell("hold", 4)
    stage.sleep(0.3)
    for partition in range(2):
        stage.produce(topic, partition, 5)
    stage.sleep(0.5)
    second = stage.member("b")
    stage.until(lambda: first.count("held"), "a polls again")
    stage.settled(first, second)


@script()
def a_topic_is_deleted(stage: Stage) -> None:
    kept, gone = stage.topic(1), stage.topic(1)
    first = stage.member("a")
    stage.settled(first)
    stage.delete_topic(gone)
    stage.until(lambda: first.owned == {(kept, 0)}, "a has one partition")
    stage.sleep(4)


@script("classic")
def eager_members_share(stage: Stage) -> None:
    stage.topic(4)
    first = stage.member("a", partition_assignment_strategy="range")
    stage.settled(first)
    second = stage.member("b", partition_assignment_strategy="range")
    stage.settled(first, second)
    second.tell("close")
    stage.settled(first)


@script()
def members_read_different_topics(stage: Stage) -> None:
    first_topic, second_topic = stage.topic(2), stage.topic(2)
    first = stage.member("a", [first_topic])
    stage.until(lambda: len(first.owned) == 2, "a has its topic")
    stage.sleep(1)
    second = stage.member("b", [second_topic])
    stage.until(lambda: len(second.owned) == 2, "b has its topic")
    stage.sleep(2)
    second.tell("close")
    stage.closed(second)
    stage.sleep(2)


@script()
def a_static_member_is_killed_and_comes_back(stage: Stage) -> None:
    stage.topic(4)
    first = stage.member("a", group_instance_id="one")
    stage.settled(first)
    second = stage.member("b", group_instance_id="two")
    stage.settled(first, second)
    second.kill()
    third = stage.member("c", group_instance_id="two")
    stage.until(lambda: third.owned or third.count("error"), "c is a member, or cannot be one")
    stage.sleep(6)


@script("classic", brokers=3)
def all_brokers_stop(stage: Stage) -> None:
    # Under the consumer protocol the real client ends with a fatal error here, because its commit blocks for longer
    # than max.poll.interval.ms while no broker is there. The model joins again: it is too kind.
    topic = stage.topic(2)
    first = stage.member("a")
    stage.settled(first)
    start = stage.stop_brokers()
    stage.until(lambda: first.failed("_TRANSPORT"), "a connection is lost")
    stage.until(lambda: first.failed("_ALL_BROKERS_DOWN"), "none is left")
    first.tell("commit", [[topic, 0, 1]])
    stage.until(lambda: first.count("commit"), "the commit is given up")
    stage.sleep(2)
    start()
    stage.sleep(8)
    stage.settled(first)
    first.tell("commit", [[topic, 0, 2]])
    stage.until(lambda: first.count("commit") == 2, "a commits")
    stage.checkpoint("after")


@script()
def a_transaction_of_another_generation(stage: Stage) -> None:
    topic = stage.topic(4)
    first = stage.member("a")
    stage.settled(first)
    alone = _metadata_of(stage, first)
    second = stage.member("b")
    stage.settled(first, second)
    both = _metadata_of(stage, first)
    kept, moved = set(first.owned), set(second.owned)
    group, _member, rest = both[11:].split(b"\0", 2)
    other = both[:11] + b"\0".join((group, b"other", rest))
    anonymous = both[:7] + (-1).to_bytes(4, "little", signed=True) + b"\0".join((group, b"", rest))
    for name, metadata in (("alone", alone), ("both", both), ("other", other), ("anonymous", anonymous)):
        stage.notes.append([name, stage.commit_as(metadata, kept), stage.commit_as(metadata, moved)])
    second.tell("close")
    stage.closed(second)
    stage.settled(first)
    for name, metadata in (("alone", alone), ("both", both)):
        stage.notes.append([name, stage.commit_as(metadata, kept), stage.commit_as(metadata, moved)])
    stage.notes.append(["none", stage.commit_as(_metadata_of(stage, first), {(topic, 0)})])


def _metadata_of(stage: Stage, member: Any) -> bytes:
    count = member.count("metadata")
    member.tell("metadata")
    stage.until(lambda: member.count("metadata") > count, "it answers")
    return bytes.fromhex([values[0] for name, *values in member.events if name == "metadata"][-1])
