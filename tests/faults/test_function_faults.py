"""Functions whose handlers and processes fail in every way; the ledger judges by their journal and the broker."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace_devkit.testing import Cluster, HeadraceProcess, StartHeadrace
from tests.faults.function_scenario import SLOW, FunctionScenario, alive, children, descriptors
from yaml_table import table

pytestmark = pytest.mark.timeout(500)

WAYS = table(__file__, "ways")
DEAD_LETTERS = table(__file__, "dead_letters")
"""What is wrong with the records that cannot be handled, by their values."""
HARMLESS = ("print", "endless", "fork", "signals", "alarm", "thread", "program")


@pytest.mark.parametrize("allocation", ["pool", pytest.param("key", marks=pytest.mark.long)])
def test_each_way_to_break_a_worker_costs_its_own_record_only(
    kafka: Cluster, headrace: StartHeadrace, tmp_path: Path, allocation: str
) -> None:
    """Those that cannot be handled are the only dead letters; the runtime opens no descriptor more, and ends."""
    scenario = FunctionScenario(
        kafka,
        headrace,
        tmp_path,
        WAYS,
        ordering="key",
        spec={"eventTimeout": "2s"},
        trigger={"numWorkers": 3, "workerTerminationTimeout": "2s", "workerMemoryLimit": "120Mi"},
        attributes={"workerAllocationMode": allocation},
    )
    process, begin = scenario.run(), time.time()
    scenario.write_values("raise")
    scenario.wait_done()
    open_before = descriptors(process)  # now that it has written a dead letter
    values = [*DEAD_LETTERS, *HARMLESS]
    between = [[str(number) for number in range(first * 30, first * 30 + 30)] for first in range(len(values))]
    scenario.write_values(*(value for way, numbers in zip(values, between, strict=True) for value in (*numbers, way)))
    scenario.wait_done()
    scenario.fault_since(begin, most=30 * 200)
    assert scenario.check() == []
    dead_letters = [record for run in scenario.recording() for record in run.dead_letters]
    found = {record.value.decode(): dict(record.headers)["headrace.dlq.error"].decode() for record in dead_letters}
    assert found == DEAD_LETTERS and len(dead_letters) == len(DEAD_LETTERS) + 1
    assert (process.output.count(": assigned "), process.output.count(": revoked ")) == (1, 0)
    assert descriptors(process) <= open_before + 5
    workers = children(process)
    assert process.terminate() == 0
    assert alive(workers) == []


@pytest.mark.long
def test_rolling_restarts_under_load_repeat_nothing(kafka: Cluster, headrace: StartHeadrace, tmp_path: Path) -> None:
    """Three processes are replaced one after the other, twice; every call is the only one of its record."""
    scenario = FunctionScenario(kafka, headrace, tmp_path, SLOW, partitions=6)
    processes: list[HeadraceProcess] = [scenario.run() for _ in range(3)]
    for _ in range(6):
        had = scenario.ended
        scenario.fill(1500)
        scenario.wait_handled(had + 300)
        assert processes.pop(0).terminate() == 0
        processes.append(scenario.run())
    scenario.check_done()
    assert scenario.dead_letters == 0
    assert [process.terminate() for process in processes] == [0, 0, 0]


@pytest.mark.long
def test_runtimes_that_are_killed_lose_nothing(kafka: Cluster, headrace: StartHeadrace, tmp_path: Path) -> None:
    """Kill -9 of the process in the middle of its frames: its workers end with it, and a peer has its partitions."""
    times = {"sessionTimeout": "3s", "heartbeatInterval": "500ms"}
    scenario = FunctionScenario(kafka, headrace, tmp_path, SLOW, attributes=times, ordering="key")
    peer = scenario.run()
    for _ in range(3):
        victim = scenario.run()
        scenario.wait_members(2)
        had = scenario.ended
        scenario.fill(1000)
        scenario.wait_handled(had + 100)
        begin, workers = time.time(), children(victim)
        victim.kill()
        scenario.wait_until(lambda workers=workers: not alive(workers), "the workers' end")
        scenario.wait_done()
        scenario.fault_since(begin, most=2 * 2 * 2000)
    assert scenario.check() == []
    assert peer.terminate() == 0
