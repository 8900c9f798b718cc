"""Planted bugs: each is a change of one line of Headrace, and a scenario must find it.

A row names the file, what stands there, and what stands there instead. `plant` changes the code of live functions, so
a process that has imported everything may plant one after its fork.
"""

import gc
import types
from pathlib import Path
from typing import NamedTuple

import headrace


class Mutation(NamedTuple):
    """One bug."""

    file: str
    old: str
    new: str


MUTATIONS: dict[str, Mutation] = {
    # What is committed
    "commit-one-too-far": Mutation(
        "delivery/tracker.py",
        "            commit = self._offsets[found]\n",
        "            commit = self._offsets[found] + 1\n",
    ),
    "commit-all-delivered": Mutation(
        "delivery/tracker.py",
        "            self._first_in_flight = found\n            commit = self._offsets[found]\n",
        "            self._first_in_flight = found\n            commit = self._offsets[-1] + 1\n",
    ),
    "commit-of-another-epoch": Mutation(
        "kafka/commits.py", "if epoch is not None and epoch == self._epoch_of.get(partition):", "if epoch is not None:"
    ),
    "done-of-another-epoch": Mutation(
        "delivery/tracker.py", "        if epoch != self.epoch:\n", "        if False:\n"
    ),
    "retry-of-a-commit-is-newer": Mutation(
        "kafka/commits.py", "            self._newest |= newer\n", "            self._newest = newer | self._newest\n"
    ),
    "two-commits-at-a-time": Mutation(
        "kafka/commits.py", "if not self._newest or self.in_flight or", "if not self._newest or"
    ),
    "map-forgets-in-flight": Mutation(
        "delivery/tracker.py",
        "encode(self._commit, end, self._in_flight_before(stop) + unseen)",
        "encode(self._commit, end, unseen)",
    ),
    # Rebalances
    "revoke-forgotten": Mutation(
        "kafka/poll_thread.py",
        "        self._drain_and_commit(partitions)\n        self.partitions.assignment.remove(revoked)\n",
        "        self.partitions.assignment.remove(revoked)\n",
    ),
    "drain-keeps-the-retries-out": Mutation(
        "delivery/lane.py",
        "        self.retries.clear()\n        self._beyond.clear()\n",
        "        for batch, _ in self.retries.backing_off.values():\n            self.complete(batch.records)\n"
        "        self.retries.clear()\n        self._beyond.clear()\n",
    ),
    "lost-is-a-revoke": Mutation(
        "kafka/poll_thread.py",
        "        self.partitions.forget(partitions)\n        self.loop.post(self.loop.listener.on_lost, partitions)\n",
        "        self._drain_and_commit(partitions)\n",
    ),
    # Order
    "order-begins-the-next": Mutation(
        "delivery/lane.py", '(self.in_flight.each and self._context.ordering == "partition")', "False"
    ),
    "key-begins-the-next": Mutation(
        "delivery/lane.py",
        "            elif key not in blocked:\n",
        "            elif key not in blocked or blocked[key] is None:\n",
    ),
}


def plant(name: str) -> None:
    """Change the code of this process as a mutation says."""
    mutation = MUTATIONS[name]
    path = Path(headrace.__file__).parent / mutation.file
    source = path.read_text()
    if source.count(mutation.old) != 1:
        raise LookupError(f"{name}: {mutation.file} has {mutation.old!r} {source.count(mutation.old)} times, not once")
    before = _codes(compile(source, str(path), "exec"))
    after = _codes(compile(source.replace(mutation.old, mutation.new), str(path), "exec"))
    changed = {name: code for name, code in after.items() if code != before.get(name)}
    planted = 0
    gc.unfreeze()  # what is frozen is not listed
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and function.__code__.co_filename == str(path):
            code = changed.get(function.__code__.co_qualname)
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code
                planted += 1
    if not planted:
        raise LookupError(f"{name}: no function of {mutation.file} has changed")


def _codes(code: types.CodeType) -> dict[str, types.CodeType]:
    """Return the code of each function by its qualified name."""
    found = {code.co_qualname: code}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _codes(constant)
    return found
