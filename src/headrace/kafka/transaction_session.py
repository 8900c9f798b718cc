"""Transactions of one session: its client is opened once, and who opens the same name later shuts it out for good.

So whoever opens a session, then reads what the ones before it have committed, and then writes, repeats nothing of
theirs, whatever they were doing when they were lost. Source: KIP-98, zombie fencing.
"""

from __future__ import annotations

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig, TransactionsConfig
from headrace.errors import KafkaTimeout, TransactionAborted
from headrace.kafka.transactions import TransactionalProducers, _Job, _Writer


class _SessionWriter(_Writer):
    """Fails what comes after its client instead of opening another one."""

    _opened = False

    def _open(self) -> bool:
        if not self._opened:
            self._opened = super()._open()
            return self._opened
        over = TransactionAborted("the session is over, and nothing more is written in it: start another one")
        while jobs := self._take():
            self._fail(jobs, over)
        return False

    def _doubted(self, jobs: list[_Job]) -> None:
        unknown = KafkaTimeout("a commit was not confirmed: the next session tells whether it was made")
        for job in jobs:
            job.results = [unknown] * job.wanted
            self._post(job)


class TransactionSession(TransactionalProducers):
    """Writes requests one transaction after the other, until the first that fails; after that all fail.

    Results of a request that was not committed are errors; `KafkaTimeout` means that only the next session can tell.
    """

    _writer = _SessionWriter

    def __init__(self, kafka: KafkaConfig, name: str) -> None:
        """Prepare; `name` is what the next session fences this one by."""
        super().__init__(kafka, ProducerConfig(transactions=TransactionsConfig(producers=1)), name, f"session {name}")
