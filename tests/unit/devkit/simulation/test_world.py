"""One seed is one run: threads, tasks, connections and faults of machines in virtual time."""

import asyncio

import pytest

from headrace_devkit.simulation import greenlet_threads
from headrace_devkit.simulation.world import Machine, World


def two_machines(seed: int) -> World:
    """Let a task and a thread of each of two machines wait by chance, pause one and kill the other."""
    world = World(seed)
    ready = greenlet_threads.Event()

    async def work() -> None:
        for number in range(5):
            await asyncio.sleep(world.random.random())
            slept = await asyncio.get_running_loop().run_in_executor(None, lambda: greenlet_threads.sleep(0.1))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.Event().wait()
            world.note("worked", number, slept)
        ready.set()

    machines = [world.machine("first"), world.machine("second")]
    for machine in machines:
        machine.loop.start(work(), lambda task: world.note("ended", str(task.exception())))
        machine.start_thread(lambda: world.note("ready", ready.wait(60)), "waits")
    world.run(2)
    machines[0].pause(5)
    machines[1].kill()
    world.run(60)
    return world


def test_a_killed_machine_does_nothing_more_and_a_paused_one_later() -> None:
    events = two_machines(1).trace
    killed = next(at for at, _, name, *_ in events if name == "kill")
    assert not [event for event in events if event[1] == "second" and event[0] > killed]
    assert not [event for event in events if event[1] == "first" and killed < event[0] < killed + 5]
    assert {event[2:] for event in events[-2:]} == {("ended", "None"), ("ready", True)}


def test_a_thread_waits_for_a_lock_and_a_queue_of_another() -> None:
    world = World(1)
    machine = world.machine("one")
    lock, queue = greenlet_threads.Lock(), greenlet_threads.Queue()

    def holds() -> None:
        with lock:
            greenlet_threads.sleep(3)
        queue.put("item")

    def waits() -> None:
        greenlet_threads.sleep(1)
        with lock:
            world.note("locked")
        world.note(queue.get(timeout=5))

    for target in (holds, waits):
        machine.start_thread(target, target.__name__)
    world.run(10)
    assert [(round(at, 3), name) for at, _, name in world.trace] == [(3, "locked"), (3, "item")]


def test_a_machine_that_kills_itself_runs_no_finally() -> None:
    world = World(1)
    machine = world.machine("one")

    def dies(of: Machine) -> None:
        try:
            of.kill()
        finally:
            world.note("finally")

    machine.start_thread(lambda: dies(machine), "dies")
    world.run(1)
    assert [name for _, _, name, *_ in world.trace] == ["kill"]
