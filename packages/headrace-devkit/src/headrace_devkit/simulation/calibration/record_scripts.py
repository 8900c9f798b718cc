"""Scripts about records: positions, ends, offsets out of range, transactions, and commits without membership."""

from headrace_devkit.simulation.calibration.scripts import script
from headrace_devkit.simulation.calibration.stages import Stage


@script("classic", brokers=3, exact=True)
def a_leader_stops(stage: Stage) -> None:
    topic = stage.topic(1)
    stage.produce(topic, 0, 5)
    first = stage.member("a", [])  # its coordinator does not matter
    first.tell("assign", [[topic, 0, 0]])
    stage.until(lambda: first.count("record") == 5, "five records")
    start = stage.stop_broker("leader", topic)
    stage.sleep(6)
    stage.produce(topic, 0, 5)
    stage.until(lambda: first.count("record") == 10, "ten records")
    start()
    stage.sleep(1)


@script(exact=True)
def a_pause_outlasts_a_rebalance(stage: Stage) -> None:
    topic = stage.topic(1)
    stage.produce(topic, 0, 3)
    first = stage.member("a")
    stage.until(lambda: first.count("record") == 3, "three records")
    first.tell("pause", [[topic, 0]])
    stage.sleep(0.5)
    first.tell("unsubscribe")
    stage.until(lambda: first.count("revoke"), "a has none")
    first.tell("subscribe", [topic])
    stage.until(lambda: first.count("assign") == 2, "a has it again")
    stage.produce(topic, 0, 2)
    stage.sleep(2)
    first.tell("assignment")
    stage.until(lambda: first.count("assignment"), "it answers")
    first.tell("resume", [[topic, 0]])
    stage.until(lambda: first.count("record") == 8, "all records again")


@script("classic", exact=True)
def committed_offsets_wait_for_a_transaction(stage: Stage) -> None:
    topic = stage.topic(1)
    first = stage.member("a", [])
    first.tell("assign", [[topic, 0, 0]])
    end = stage.offsets_in_transaction(topic, 0, 5)
    stage.sleep(0.5)
    first.tell("committed", [[topic, 0]])
    stage.sleep(1.5)
    first.tell("assignment")
    stage.sleep(0.5)
    end("commit")
    stage.until(lambda: first.count("assignment"), "it answers")
    end = stage.offsets_in_transaction(topic, 0, 9)
    end("abort")
    first.tell("committed", [[topic, 0]])
    stage.until(lambda: first.count("committed") == 2, "it answers")
    stage.checkpoint("after")


@script("classic", exact=True)
def records_are_deleted_while_they_are_read(stage: Stage) -> None:
    topic = stage.topic(1)
    stage.produce(topic, 0, 4)
    first = stage.member("a", [], enable_partition_eof=True)
    first.tell("assign", [[topic, 0, 0]])
    stage.until(lambda: first.count("end"), "the end")
    first.tell("pause", [[topic, 0]])
    stage.sleep(0.5)
    stage.produce(topic, 0, 6)
    stage.delete_before(topic, 0, 8)
    first.tell("resume", [[topic, 0]])
    stage.until(lambda: first.count("end") == 2, "the end again")


@script("classic", exact=True)
def records_ends_and_seeks(stage: Stage) -> None:
    topic = stage.topic(1)
    stage.produce(topic, 0, 5)
    first = stage.member("a", enable_partition_eof=True)
    stage.until(lambda: first.count("end") == 1, "the end")
    first.tell("position", topic, 0)
    first.tell("seek", topic, 0, 2)
    stage.until(lambda: first.count("end") == 2, "the end again")
    first.tell("move", topic, 0, 4)
    stage.until(lambda: first.count("end") == 3, "the end, a third time")
    stage.produce(topic, 0, 1)
    stage.until(lambda: first.count("end") == 4, "the end, a fourth time")
    first.tell("pause", [[topic, 0]])
    stage.sleep(0.3)
    stage.produce(topic, 0, 2)
    stage.sleep(1)
    first.tell("assignment")
    stage.until(lambda: first.count("assignment"), "it answers")
    first.tell("resume", [[topic, 0]])
    stage.until(lambda: first.count("end") == 5, "the end, a fifth time")
    first.tell("watermarks", topic, 0)
    stage.until(lambda: first.count("watermarks"), "it answers")


@script("classic", exact=True)
def an_offset_out_of_range_is_reported(stage: Stage) -> None:
    topic = stage.topic(1)
    stage.produce(topic, 0, 10)
    stage.delete_before(topic, 0, 4)
    first = stage.member("a", [], auto_offset_reset="error", enable_partition_eof=True)
    first.tell("assign", [[topic, 0, 2]])
    stage.until(lambda: first.count("error"), "an error")
    first.tell("assign", [[topic, 0, 8]])
    stage.until(lambda: first.count("end"), "the end")
    first.tell("assign", [[topic, 0, 12]])
    stage.until(lambda: first.count("error") == 2, "another error")
    first.tell("assign", [[topic, 0, -2]])
    stage.until(lambda: first.count("end") == 2, "the end again")
    first.tell("assign", [[topic, 0, -1001]])
    stage.until(lambda: first.count("error") == 3, "no committed offset")


@script("classic", exact=True)
def an_offset_out_of_range_resets(stage: Stage) -> None:
    topic = stage.topic(1)
    stage.produce(topic, 0, 10)
    stage.delete_before(topic, 0, 4)
    first = stage.member("a", [], enable_partition_eof=True)
    first.tell("assign", [[topic, 0, 2]])
    stage.until(lambda: first.count("end"), "the end")
    first.tell("commit", [[topic, 0, 6]])
    first.tell("committed", [[topic, 0]])
    stage.until(lambda: first.count("committed"), "committed")
    first.tell("assign", [[topic, 0, -1001]])
    stage.until(lambda: first.count("end") == 2, "the end again")
    stage.checkpoint("after")


@script("classic", exact=True)
def transactions_are_read_when_they_are_over(stage: Stage) -> None:
    topic = stage.topic(1)
    stage.produce(topic, 0, 2)
    first = stage.member("a", [], enable_partition_eof=True)
    other = stage.member("b", [], enable_partition_eof=True, isolation_level="read_uncommitted")
    for member in (first, other):
        member.tell("assign", [[topic, 0, 0]])
    stage.until(lambda: first.count("end") and other.count("end"), "the end")
    aborted = stage.transaction(topic, 0, 3)
    stage.produce(topic, 0, 1)
    stage.until(lambda: other.count("record") == 6, "all records are seen")
    stage.sleep(1)
    aborted("abort")
    stage.until(lambda: first.count("record") == 3, "what is behind an aborted transaction")
    stage.sleep(1)
    stage.transaction(topic, 0, 2, "commit")
    stage.until(lambda: first.count("record") == 5, "a committed transaction")
    stage.sleep(1)
    stage.transaction(topic, 0, 2, "abort")
    stage.sleep(1.5)
    first.tell("watermarks", topic, 0)
    stage.until(lambda: first.count("watermarks"), "it answers")


@script("classic", exact=True)
def commits_by_hand(stage: Stage) -> None:
    topic = stage.topic(2)
    first = stage.member("a", [])
    first.tell("assign", [[topic, 0, 0]])
    first.tell("commit", [[topic, 0, 3], [topic, 1, 4]])
    first.tell("commit_async", [[topic, 0, 5]])
    first.tell("commit", [[topic, 0, -1001]])
    stage.until(lambda: first.count("commit") == 2 and first.count("on_commit"), "commits are answered")
    second = stage.member("b")
    stage.settled(second)
    first.tell("commit", [[topic, 0, 9]])
    stage.until(lambda: first.count("commit") == 3, "the commit is answered")
    first.tell("commit_async", [[topic, 0, 9]])
    stage.until(lambda: first.count("on_commit") == 2, "the commit is answered")
    stage.checkpoint("after")


@script("classic", exact=True)
def a_missing_topic_is_reported(stage: Stage) -> None:
    topic = stage.topic(1)
    first = stage.member("a", [topic, f"{topic}-missing"])
    stage.until(lambda: first.count("error") and first.count("assign"), "an error and an assignment")
    stage.sleep(1)


@script(exact=True)
def wrong_calls(stage: Stage) -> None:
    topic = stage.topic(2)
    stage.produce(topic, 0, 3)
    first = stage.member("a")
    stage.settled(first)
    stage.until(lambda: first.count("record") == 3, "three records")
    missing = f"{topic}-missing"
    calls = [
        ("incremental_assign", [[topic, 0, 0]]),
        ("incremental_unassign", [[topic, 7]]),
        ("assign", [[topic, 0, 0]]),
        ("incremental_assign", [[topic, 1, -7]]),
        ("seek", topic, 7, 0),
        ("seek", missing, 0, 0),
        ("position", topic, 0),
        ("position", topic, 1),
        ("position", missing, 0),
        ("pause", [[missing, 0]]),
        ("resume", [[topic, 7]]),
        ("commit", [[topic, 7, 1]]),
        ("commit", [[missing, 0, 1]]),
        ("commit", [[topic, 0, 2], [topic, 7, 1]]),
        ("committed", [[topic, 0], [topic, 1]]),
        ("committed", [[missing, 0]]),
        ("watermarks", topic, 1),
        ("watermarks", topic, 7),
        ("watermarks", missing, 0),
        ("times", topic, 0, -1),
        ("times", topic, 1, 1),
        ("times", topic, 7, -1),
        ("topics", topic),
        ("topics", missing),
        ("assignment",),
    ]
    for name, *values in calls:
        first.tell(name, *values)
        stage.sleep(0.3)
    stage.until(lambda: first.count("assignment"), "it answers", 120)
    stage.checkpoint("after")
