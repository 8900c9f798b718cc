"""What other products lost, as public threads describe it: each is a scenario of push by seed."""

from typing import Any

from headrace_devkit.simulation.push_scenario import PushOptions, PushRun
from headrace_devkit.simulation.simulated_process import SimulatedProcess
from headrace_devkit.simulation.world import World

_CALM: dict[str, Any] = {
    "batch": 1,
    "mode": "results",
    "retry_topics": (),
    "keep_key_order": False,
    "drain": 10.0,
    "processes": 2,
    "faults": 0,
    "trouble": 0.0,
    "poison": 0.0,
    "bad": 0.0,
    "buffer": 20_000,
    "closes": False,
    "write_seconds": 30,
}
_HEAL_SECONDS = 420.0


def same_record_at_two(world: World) -> PushOptions:
    """Slow records, while a second member comes and goes (dapr/components-contrib#4577)."""
    options = PushOptions.drawn(world.random, **_CALM | {"work": 6.0, "rate": 1.0, "partitions": 3})
    run = PushRun(world, options)
    with run.kafka.installed():
        _load(run, 120, 120)
        _come_and_go(run, 20)
        _end(run)
    return options


def failing_record_bounces(world: World) -> PushOptions:
    """One record that always fails, while members come and go (dapr/components-contrib#4580)."""
    own = {"attempts": 20, "max_delay": 10.0, "partitions": 1, "work": 0.05, "in_flight": 1, "ordering": "partition"}
    options = PushOptions.drawn(world.random, **_CALM | own)
    run = PushRun(world, options._replace(poison=1.0))
    counts: dict[int, int] = {}

    def arrived(_process: str, _topic: str, _partition: int, offset: int, _attempt: int) -> None:
        counts[offset] = counts.get(offset, 0) + 1

    world.watch("arrived", arrived)
    with run.kafka.installed():
        world.call_later(30, run.produce)
        _come_and_go(run, 20)
        _end(run)
    if max(counts.values(), default=0) > options.attempts:
        world.problem("REPEATED", f"a record that fails was delivered {counts} times, with {options.attempts} attempts")
    return options


def drained_partition_resumes(world: World) -> PushOptions:
    """A drain while the backend does not answer; their next owner resumes its partitions (nuclio/nuclio#4180)."""
    options = PushOptions.drawn(world.random, **_CALM | {"work": 0.05, "rate": 5.0, "partitions": 3, "drain": 2.0})
    run = PushRun(world, options._replace(trouble=0.3))
    with run.kafka.installed():
        _load(run, 400, 80)
        _come_and_go(run, 15)
        _end(run)
    return options


def failures_cross_a_commit(world: World) -> PushOptions:
    """A third of the records fail at first, many are in flight, and processes are killed (spring-kafka#4504, #4505)."""
    own = {"ordering": "none", "in_flight": 64, "attempts": 5, "max_delay": 2.0, "rate": 40.0, "work": 0.2}
    options = PushOptions.drawn(world.random, **_CALM | own)
    run = PushRun(world, options._replace(bad=0.3))
    with run.kafka.installed():
        _load(run, 1500, 80)
        for at in range(20, 100, 10):
            world.call_later(at, lambda: _restart(run, world.random.choice(run.processes)))
        _end(run)
    return options


def _load(run: PushRun, records: int, seconds: float) -> None:
    for _ in range(records):
        run.world.call_later(5 + run.world.random.uniform(0, seconds), run.produce)


def _come_and_go(run: PushRun, every_seconds: float) -> None:
    """Let the second member, by turns, end and start, each by SIGTERM."""
    for turn in range(1, 9):
        at = turn * every_seconds + run.world.random.uniform(0, 5)
        run.world.call_later(at, run.processes[1].stop if turn % 2 else lambda: _start(run, run.processes[1]))


def _start(run: PushRun, process: SimulatedProcess) -> None:
    if not process.running:
        process.start()
    else:  # it still drains
        run.world.call_later(1.0, lambda: _start(run, process))


def _restart(run: PushRun, process: SimulatedProcess) -> None:
    if process.running:
        process.kill()
        run.world.call_later(5.0, lambda: _start(run, process))


def _end(run: PushRun) -> None:
    for process in run.processes:
        process.start()
    run.world.run(200)
    run.is_healed = True
    if not run.world.run_until(run.is_done, _HEAL_SECONDS):
        left = run.checker.open_records()
        run.world.problem("LAG", f"{len(left)} records are not completed, lag {run.lag()}: {left[:3]}")
