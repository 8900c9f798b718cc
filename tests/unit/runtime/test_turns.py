"""Long computations take turns."""

from __future__ import annotations

import asyncio

from headrace.runtime import next_slice


async def test_one_computation_runs_in_each_turn_of_the_loop() -> None:
    """In the order of their calls; a cancelled one delays no other."""
    ran: list[tuple[int, int]] = []
    turn = 0

    async def work(number: int) -> None:
        for _ in range(3):
            await next_slice()
            ran.append((turn, number))

    tasks = [asyncio.create_task(work(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn += 1

    turns = [at for at, _ in ran]
    assert len(turns) == len(set(turns)) == 9
    assert [number for _, number in ran[:3]] == [0, 2, 3]
