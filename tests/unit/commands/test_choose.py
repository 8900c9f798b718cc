"""Where consumers are placed: bounds, zones, stickiness, few moves, the same for all."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.commands.placement import choose as module
from headrace.commands.placement.choose import PlacedConsumer, PlacedProcess, choose

_OWN_THREADS = 40
"""Threads of a process besides those of its consumers, with some to spare: docs/sizing.md."""
NAMES = st.lists(st.integers(0, 10_000), min_size=1, max_size=60, unique=True)
PROCESSES = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 3)), min_size=1, max_size=12, unique_by=lambda one: one[0]
).map(lambda found: [PlacedProcess(f"p{number}", f"z{zone}") for number, zone in found])
CONSUMERS = NAMES.map(lambda found: [PlacedConsumer(f"c{number}", 1 + number % 3) for number in found])


def moves(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> int:
    """Return how many places are new."""
    return sum(len({*after[name]} - {*before.get(name, ())}) for name in after)


@settings(max_examples=150, deadline=None)
@given(CONSUMERS, PROCESSES, st.randoms())
def test_each_consumer_has_its_copies_within_the_bound_of_threads(
    consumers: list[PlacedConsumer], processes: list[PlacedProcess], random: object
) -> None:
    """Whatever the order in which consumers and processes are known, so every process chooses the same."""
    chosen = choose(consumers, processes)
    for one in consumers:
        assert len({*chosen[one.name]}) == len(chosen[one.name]) == min(one.copies, len(processes))
    threads = Counter(name for names in chosen.values() for name in names)
    mean = sum(threads.values()) / len(processes)
    assert max(threads.values()) <= max(1.35 * mean, mean + 2) + 1
    random.shuffle(consumers)  # type: ignore[attr-defined]
    random.shuffle(processes)  # type: ignore[attr-defined]
    assert choose(consumers, processes) == chosen


@settings(max_examples=100, deadline=None)
@given(NAMES, st.integers(2, 4), st.integers(2, 4))
def test_no_zone_has_a_consumer_twice_before_each_zone_has_it(names: list[int], zones: int, size: int) -> None:
    processes = [PlacedProcess(f"p{zone}-{number}", f"z{zone}") for zone in range(zones) for number in range(size)]
    zone_of = {one.name: one.zone for one in processes}
    consumers = [PlacedConsumer(f"c{number}", 2) for number in names]
    for names_of in choose(consumers, processes).values():
        assert len({zone_of[name] for name in names_of}) == 2


@settings(max_examples=100, deadline=None)
@given(CONSUMERS, PROCESSES)
def test_nothing_moves_when_nothing_changed_and_little_when_a_process_comes_or_goes(
    consumers: list[PlacedConsumer], processes: list[PlacedProcess]
) -> None:
    chosen = choose(consumers, processes)
    assert moves(chosen, choose(consumers, processes, chosen)) == 0
    gone = processes[0].name
    if len(processes) > 1:
        after = choose(consumers, processes[1:], chosen)
        lost = sum(gone in names for names in chosen.values())
        kept = sum(len({*after[name]} & {*names}) for name, names in chosen.items())
        full = sum(len(names) for names in chosen.values())
        assert kept >= full - lost - len(consumers) // 2
    one_more = choose([*consumers, PlacedConsumer("new")], processes, chosen)
    assert moves(chosen, {name: one_more[name] for name in chosen}) <= len(consumers) // 4 + 1


def test_a_restart_among_two_hundred_processes_touches_few_groups() -> None:
    """With four thousand consumers: 1.5 % of them at most, and 400 threads in no process, by six for each consumer."""
    processes = [PlacedProcess(f"p{number}", f"z{number % 3}") for number in range(200)]
    consumers = [PlacedConsumer(f"c{number}") for number in range(4000)]
    chosen = choose(consumers, processes)
    most = max(Counter(name for names in chosen.values() for name in names).values())
    assert most <= 0.015 * len(consumers)
    assert most * consumers[0].threads + _OWN_THREADS <= 400
    without = choose(consumers, processes[1:], chosen)
    assert len([name for name in chosen if without[name] != chosen[name]]) <= 0.015 * len(consumers)


@settings(max_examples=100, deadline=None)
@given(CONSUMERS, PROCESSES, st.data())
def test_a_consumer_runs_only_where_its_file_has_it(
    consumers: list[PlacedConsumer], processes: list[PlacedProcess], data: st.DataObject
) -> None:
    names = [one.name for one in processes]
    some = st.lists(st.sampled_from(names), min_size=1, unique=True)
    consumers = [one._replace(known_by=data.draw(some)) for one in consumers]
    before = choose([one._replace(known_by=()) for one in consumers], processes)
    chosen = choose(consumers, processes, before)
    for one in consumers:
        assert {*chosen[one.name]} <= {*one.known_by}
        assert len(chosen[one.name]) == min(one.copies, len(one.known_by))
    after = choose(consumers, processes, chosen)
    assert moves(after, choose(consumers, processes, after)) == 0


def test_without_processes_nothing_runs() -> None:
    assert choose([PlacedConsumer("a")], []) == {"a": ()}


def test_where_nothing_changes_no_process_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4,000 consumers and 200 processes that took a second of the loop each time."""
    processes = [PlacedProcess(f"p{number}") for number in range(20)]
    consumers = [PlacedConsumer(f"c{number}") for number in range(40)]
    chosen, ranks = choose(consumers, processes), list[str]()
    rank = module._rank
    monkeypatch.setattr(module, "_rank", lambda one, name: ranks.append(name) or rank(one, name))
    assert choose(consumers, processes, chosen) == chosen
    assert len(ranks) == 2 * 40
