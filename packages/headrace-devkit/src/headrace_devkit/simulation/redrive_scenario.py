"""The scenario of a redrive: whole processes push to a backend that refuses, then send the dead letters back.

While the job runs, its processes are killed and paused. In the end it is done, and each dead letter is back in its
topic: at least once, and exactly once where that is requested.
"""

from collections.abc import Sequence
from typing import Any

from headrace_devkit.simulation.job_run import TOPIC, JobChoices, JobRun
from headrace_devkit.simulation.simulated_backend import Arrived, BackendAction
from headrace_devkit.simulation.world import Machine, World

DEAD_LETTERS = "orders.dlq"
_FAILING = 4
"""One in this many records fails."""


class RedriveRun(JobRun):
    """A redrive of the records that the backend has refused."""

    def __init__(self, world: World, choices: JobChoices, *, is_exactly_once: bool) -> None:
        super().__init__(world, choices, DEAD_LETTERS)
        self._is_exactly_once = is_exactly_once
        self._dead_letters = range(0, choices.records, _FAILING)
        """The values that the backend refuses: too few to open its breaker."""

    @property
    def total(self) -> int:
        return len(self._dead_letters)

    def decide(self, process: Machine, records: Sequence[Arrived]) -> BackendAction:
        bad = {index for index, one in enumerate(records) if not self.has_begun and one.value in self._dead_letters}
        return BackendAction(0.005, frozenset(bad))

    def request(self) -> tuple[str, dict[str, Any]]:
        body = {"rate": self.choices.rate, "exactlyOnce": self._is_exactly_once}
        return f"/adm/dead-letters/{DEAD_LETTERS}/redrive", body

    def is_pushed(self) -> bool:
        return self.counts(DEAD_LETTERS).keys() == {*self._dead_letters}

    def check(self) -> None:
        counts = self.counts(TOPIC)
        for number in self._dead_letters:
            back = counts.get(number, 0) - 1
            if back < 1 or (self._is_exactly_once and back != 1):
                self.world.problem("BACK", f"dead letter {number} is back {back} times")


def redriving(world: World) -> Sequence[Any]:
    """Run the scenario; return the options of its seed."""
    choices, is_exactly_once = JobChoices.of(world.random), world.random.choice((True, False))
    RedriveRun(world, choices, is_exactly_once=is_exactly_once).go()
    return [choices, is_exactly_once]
