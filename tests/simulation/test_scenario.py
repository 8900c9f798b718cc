"""A scenario in twenty lines: the example of docs/developers/simulation.md."""

import pytest

from headrace_devkit.simulation.push_scenario import PushOptions, PushRun
from headrace_devkit.simulation.scenario_runs import run_many
from headrace_devkit.simulation.world import World


def killed_while_it_delivers(world: World) -> None:
    run = PushRun(world, PushOptions.drawn(world.random, processes=2, ordering="key", faults=0))
    with run.kafka.installed():
        for process in run.processes:
            process.start()
        world.run(10)
        for _ in range(50):
            run.produce()
        world.run(1)
        run.processes[0].kill()
        run.is_healed = True  # the backend takes everything from now on, apart from poisoned records
        if not world.run_until(run.is_done, 120):
            world.problem("LAG", f"{len(run.checker.open_records())} records are not completed")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_process_loses_nothing(seed: int) -> None:
    world = World(seed)
    killed_while_it_delivers(world)
    assert world.problems == []
    assert world.counts["kill"] == 1


@pytest.mark.parametrize(
    "scenario", ["same-record-at-two", "failing-record-bounces", "drained-partition-resumes", "failures-cross-a-commit"]
)
def test_what_others_lost_is_not_lost(scenario: str) -> None:
    (run,) = run_many(scenario, [1])
    assert run.problems == []
    assert run.counts["rebalance"] > 5
