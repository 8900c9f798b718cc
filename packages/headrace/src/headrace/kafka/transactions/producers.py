"""Transactional producers: all records of a request are visible at read_committed, or none ever is.

Each client has its own thread, because its calls block. Waiting requests are written in one transaction; if one of them
fails, each is written again by itself. A request ends in one of three ways:

- committed: the client confirmed it.
- not committed: no commit was requested. Records in the log are aborted, now or later.
- in doubt: a commit was requested and not confirmed. Then nothing is aborted. The client is replaced, and when its
  successor is open the broker has ended the transaction; so reading the topic shows how it ended.
Source: KIP-98; KIP-447 for the offsets of a consumer group.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig, TransactionsConfig
from headrace.kafka.admin import Admin
from headrace.kafka.client import library
from headrace.kafka.client.access import Right
from headrace.kafka.client.credentials import ClientSecurity
from headrace.kafka.client.error_map import refused_records, to_error
from headrace.kafka.reader import read_records
from headrace.kafka.transactions.transaction_job import GroupOffsets, LastRecord, TransactionJob
from headrace.kafka.transactions.transactional_client import (
    BROKEN,
    STATISTICS_SECONDS,
    TransactionalClient,
    transactional_properties,
)
from headrace.kafka.write_request import Results
from headrace.records import OutgoingRecord, TopicPartition
from headrace.runtime import Deadline, LoopBridge, OwnedThread, Service, blocking, chance, clock

log = logging.getLogger(__name__)

_OPEN_SECONDS: Final = 5.0
_REOPEN_SECONDS: Final = 0.5
_YIELD_SECONDS: Final = 10.0
"""For this long, a client that was fenced is opened again only for a request."""
_TOGETHER_RECORDS: Final = 10_000
_LOOK_UP_SECONDS: Final = 60.0
_LOOK_AGAIN_SECONDS: Final = 5.0
_THREAD_STOP_SECONDS: Final = 5.0
_ATTEMPT: Final = "request.timeout.ms"
_TIMEOUT_MS: Final = 10_000
"""Time limit of a transaction and of its records, after which Kafka aborts it if the process is lost."""
_ALONE: Final = {"batch.size": 1, "delivery.timeout.ms": 120_000, "transaction.timeout.ms": 120_000}
"""One record per batch, which takes a round trip for five records of a broker."""
MAX_WAITING: Final = 64
"""Requests that are being written or wait; above this, requests are answered 503 at once."""


class _Writer:
    """One transactional client; everything runs on its thread."""

    _renews = True

    def __init__(
        self,
        kafka: KafkaConfig,
        security: ClientSecurity[dict[str, Any]],
        jobs: blocking.SimpleQueue[TransactionJob],
        post: Callable[[TransactionJob], None],
    ) -> None:
        # Permanent
        self._kafka = kafka
        self._security = security
        self._jobs = jobs
        self._post = post
        # For one client
        self._properties = security.make()
        self._client: TransactionalClient | None = None
        self._alone = False
        """Whether the current request is written with one record per batch."""
        # Over several clients
        self._in_doubt: list[TransactionJob] = []
        self._problem = ""
        self._failures = 0
        """How many clients in a row have failed."""
        self._open_at = 0.0
        """When to open a client even if no request waits."""

    def run(self, stop_requested: blocking.Event) -> None:
        """Write requests until the stop is requested."""
        while not stop_requested.is_set():
            yields = self._jobs.empty() and clock.monotonic() < self._open_at
            if self._client is None and (yields or not self._open()):
                stop_requested.wait(STATISTICS_SECONDS if yields else _REOPEN_SECONDS)
            elif jobs := self._take():
                self._write(jobs)
            else:
                self._poll()
                self._close_if(self._outdated())
        self._close()

    def _open(self) -> bool:
        """Open a client, which fences its predecessor and so ends the transaction that it left open."""
        blocking.sleep(chance.uniform(0, _REOPEN_SECONDS * self._failures))
        try:
            self._properties = self._security.make()
            if self._alone:
                self._properties |= _ALONE
            client = TransactionalClient(self._kafka, self._properties, _OPEN_SECONDS)
        except library.KafkaException as cause:
            name = self._properties["transactional.id"]
            needed = Right("Write", "transactional-id", name)
            error = to_error(cause, f"open the transactional producer {name}", self._kafka, needed)
            if error.description != self._problem:
                log.warning("%s", error.description)
            self._problem = error.description
            while not error.retriable and (jobs := self._take()):
                self._fail(jobs, error)
            return False
        self._client = client
        self._problem = ""
        for job in self._in_doubt:
            self._post(job)
        self._in_doubt.clear()
        return True

    def _close(self) -> None:
        if self._client:
            self._client.close()
            self._client = None

    def _close_if(self, problem: str) -> bool:
        if problem:
            log.info("transactional producer %s is replaced: %s", self._properties["transactional.id"], problem)
            self._close()
        return bool(problem)

    def _close_failed(self, why: object, yield_seconds: float = 0.0) -> None:
        """Close a client that was perhaps fenced; two that reopen at once would fence each other for ever."""
        self._close_if(f"{why}. If fenced, another process uses its name: producer.transactions.id")
        self._failures = min(self._failures + 1, 4)
        self._open_at = clock.monotonic() + yield_seconds

    def _outdated(self) -> str:
        """Return why the client must not begin another transaction; empty if it may."""
        if not self._client:
            return ""
        changed = self._security.must_replace(self._client.producer)
        return "the files of kafka.security have changed" if changed and self._renews else self._client.problem()

    def _poll(self) -> None:
        try:
            if self._client:
                self._client.poll(0)
        except BROKEN as cause:
            self._close_if(f"it failed: {cause}")

    def _take(self) -> list[TransactionJob]:
        """Return waiting requests up to the limit of one transaction; wait a moment for the first."""
        jobs: list[TransactionJob] = []
        with contextlib.suppress(blocking.Empty):
            while sum(job.record_count for job in jobs) < _TOGETHER_RECORDS:
                job = self._jobs.get_nowait() if jobs else self._jobs.get(timeout=STATISTICS_SECONDS)
                if job.claim():
                    jobs.append(job)
        return jobs

    def _write(self, jobs: list[TransactionJob]) -> None:
        client = self._usable_client()
        if client is None:
            self._fail(jobs, errors.KafkaUnavailable("no transactional producer could be opened: send it again"))
            return
        try:
            client.begin()
            self._send(client, jobs)
        except BROKEN as cause:  # no commit was requested
            why = cause.__cause__ or cause
            self._fail(jobs, errors.TransactionAborted(cause=str(why)))
            self._close_failed(why, _YIELD_SECONDS)
            return
        if all(job.written for job in jobs):
            self._commit(client, jobs)
        else:
            self._abort(client, jobs)

    def _usable_client(self) -> TransactionalClient | None:
        while self._client or self._open():
            if self._client and not self._client.has_statistics():
                self._close_if("it sends no statistics")
                break
            if not self._close_if(self._outdated()):
                return self._client
        return None

    def _send(self, client: TransactionalClient, jobs: list[TransactionJob]) -> None:
        """Write the records, then the last record of each job. The client's own time limit ends it."""

        def has_failed() -> bool:
            return any(job.has_failed for job in jobs)

        for job in jobs:
            job.restart()
            job.send(client, has_failed)
        client.flush(has_failed)
        if all(job.written for job in jobs):
            closing = [job for job in jobs if job.last_record]
            for job in closing:
                job.send(client, has_failed)
            if closing:
                client.flush(has_failed)
        if all(job.written for job in jobs):
            for job in jobs:
                if job.group and (error := job.group.send(client)):
                    job.problem, job.results = error, [error] * len(job.records)

    def _commit(self, client: TransactionalClient, jobs: list[TransactionJob]) -> None:
        try:
            client.commit()
        except BROKEN as cause:  # whatever it is: the first request may have been carried out
            log.warning("commit of %s failed: %s", self._properties["transactional.id"], cause)
            self._doubted(jobs)
            self._close_failed(cause)
            return
        self._failures = 0
        for job in jobs:
            self._post(job)

    def _doubted(self, jobs: list[TransactionJob]) -> None:
        for job in jobs:
            job.in_doubt = True
        self._in_doubt += jobs

    def _abort(self, client: TransactionalClient, jobs: list[TransactionJob]) -> None:
        """Abort a transaction; each of several requests in it is then written by itself.

        When Kafka has refused a batch of one request as too large, each record of it is written once more, alone.
        """
        again = len(jobs) == 1 and jobs[0].may_fit_alone and self._renews and not self._alone
        failed = [error for job in jobs for error in job.failures]
        if len(jobs) == 1 and not again:
            aborted = errors.TransactionAborted(cause=failed[0].description if failed else "")
            self._fail(jobs, refused_records(client.begin, self._kafka, jobs[0].records) or aborted)
        in_flight = any(isinstance(error, errors.KafkaTimeout) for error in failed)
        if not in_flight:  # else the call would fail
            with contextlib.suppress(*BROKEN):
                client.producer.transact("abort_transaction")
        # After a failure its numbers may have a gap, which the broker would refuse in the next transaction.
        if fatal := [error.description for error in failed if isinstance(error, errors.FatalKafkaError)]:
            self._close_failed(fatal[0], _YIELD_SECONDS)
        self._close()
        self._alone = again
        for job in jobs if again or len(jobs) > 1 else ():
            job.restart()
            self._write([job])
        if again:
            self._close()
            self._alone = False

    def _fail(self, jobs: list[TransactionJob], reason: errors.HeadraceError) -> None:
        for job in jobs:
            job.fail(reason)
            self._post(job)


class TransactionalProducers(Service):
    """Writes requests as transactions. Nothing is opened before `open` or the first request."""

    _writer = _Writer
    _gauge = "headrace_waiting_transactions"
    _names_culprits = False

    def __init__(
        self,
        kafka: KafkaConfig,
        settings: ProducerConfig,
        id_prefix: str,
        name: str = "transactions",
        admin: Admin | None = None,
    ) -> None:
        super().__init__(name)
        self._admin = admin or Admin(kafka)
        self._kafka = kafka
        self._settings = settings
        self._id_prefix = id_prefix
        self._jobs: blocking.SimpleQueue[TransactionJob] = blocking.SimpleQueue()
        self._open_jobs: dict[TransactionJob, asyncio.TimerHandle] = {}
        """Transactions that wait or are being written, and the timers that withdraw them."""
        self._idle = asyncio.Event()
        self._threads: list[OwnedThread] = []

    async def start(self) -> None:
        if self._gauge:
            self.publish(self._gauge, lambda: len(self._open_jobs))

    def open(self) -> None:
        """Open the producers, which ends the transactions that an earlier process with their names left open."""
        if self._threads:
            return
        loop = asyncio.get_running_loop()
        bridge = LoopBridge(loop, self._finish)
        for number in range(self._settings.transactions.producers):
            properties = functools.partial(self._properties, f"{self._id_prefix}-{number}")
            security = ClientSecurity(self._kafka.security, properties)
            writer = self._writer(self._kafka, security, self._jobs, bridge.post)
            self._threads.append(OwnedThread(f"{self.name}-{number}", writer.run, self.die))
            self._threads[-1].start()

    def submit(
        self,
        records: Sequence[OutgoingRecord],
        last_record: LastRecord | None = None,
        group: GroupOffsets | None = None,
    ) -> asyncio.Future[Results]:
        """Write records as one transaction.

        Args:
            last_record: Makes a last record, in the same transaction, from the offsets of the others.
            group: Offsets that are committed in the same transaction. `CommitRefused` means that the member is gone.

        Returns:
            A future that gets one result per record when the outcome is known: each of them written and visible, or
            none, and then all results are errors. It has no time limit where a commit is in doubt. Errors of that kind
            (`KafkaTimeout`) come only when the process stops or, without a last record, the topic cannot be read.

        Raises:
            ProducerQueueFull: Too many wait; nothing was sent.
            KafkaUnavailable: No broker has answered for a while; nothing was sent.
        """
        self._admin.reachability.check(self._settings.unreachable_seconds)
        if len(self._open_jobs) >= MAX_WAITING:
            raise errors.ProducerQueueFull(
                f"limit reached: {len(self._open_jobs)} transactions wait; nothing of this request was sent, "
                "send it again after a pause"
            )
        self.open()
        job = TransactionJob(records, last_record, group, self._kafka, names_culprits=self._names_culprits)
        limit = self._settings.delivery_timeout_seconds
        self._open_jobs[job] = asyncio.get_running_loop().call_later(limit, self._withdraw, job)
        self._idle.clear()
        self._jobs.put(job)
        return job.response

    async def drain(self, deadline: Deadline) -> None:
        if self._open_jobs:
            await asyncio.wait_for(self._idle.wait(), deadline.remaining_seconds)

    async def stop(self) -> None:
        for thread in self._threads:
            thread.stop_requested.set()
        for thread in self._threads:
            await thread.stop(_THREAD_STOP_SECONDS)
        await super().stop()
        unknown = errors.KafkaTimeout("this process is stopping before the outcome of the transaction is known")
        for job in list(self._open_jobs):
            job.problem = unknown
            self._settle(job, [unknown] * job.record_count)

    def _withdraw(self, job: TransactionJob) -> None:
        if not job.response.done() and job.claim():
            job.fail(errors.KafkaUnavailable("no transactional producer was free or open in time: send it again"))
            self._settle(job, job.results)

    def _finish(self, jobs: list[TransactionJob]) -> None:
        for job in jobs:
            if job.in_doubt:
                self.keep(functools.partial(self._look_up, job), "look up")
            else:
                self._settle(job, job.results)

    async def _look_up(self, job: TransactionJob) -> None:
        """Find out how a transaction has ended: its last record is visible, or skipped."""
        written = job.results[-1]
        partition = TopicPartition(job.records[-1].topic, written.partition)
        while True:
            reading = read_records(self._kafka, {partition: written.offset}, {partition: written.offset + 1})
            try:
                async with asyncio.timeout(_LOOK_UP_SECONDS), contextlib.aclosing(reading):
                    visible = [record async for records in reading for record in records]
                break
            except (errors.HeadraceError, TimeoutError) as cause:
                what = f"whether a transaction with {partition} offset {written.offset} was committed"
                log.warning("%s is unknown: %s", what, cause or type(cause).__name__)
                if job.last_record is None:
                    self._settle(job, [errors.KafkaTimeout()] * job.record_count)
                    return
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)  # a last record must be known: retry until there is a response
        log.info("a transaction in doubt was %s", "committed" if visible else "aborted")
        if not visible:
            job.fail(errors.TransactionAborted())
        self._settle(job, job.results)

    def _settle(self, job: TransactionJob, results: Results) -> None:
        timer = self._open_jobs.pop(job, None)
        if timer:
            timer.cancel()  # it keeps the records in memory
        job.respond(results)
        if not self._open_jobs:
            self._idle.set()

    def _properties(self, transactional_id: str) -> dict[str, Any]:
        limit_ms = self._settings.client_properties.get("transaction.timeout.ms", _TIMEOUT_MS)
        # The flush at the end of a transaction sends at once. Without a linger time records would be sent one by one.
        known = {name: value for name, value in self._settings.lasting.properties.items() if name != _ATTEMPT}
        own = {"properties": {**known, "delivery.timeout.ms": limit_ms, "linger.ms": 5}}
        settings = self._settings.model_copy(update=own)
        return {
            **transactional_properties(self._kafka, settings, transactional_id, limit_ms / 1000),
            "retries": 2**31 - 1,
            "error_cb": self._admin.reachability.failed,
        }


class _SessionWriter(_Writer):
    """Fails later requests instead of opening another client, so changed certificates apply to the next session."""

    _opened = _renews = False

    def _open(self) -> bool:
        if not self._opened:
            self._opened = super()._open()
            return self._opened
        over = errors.TransactionAborted("the session is over and writes nothing more: start another one")
        while jobs := self._take():
            self._fail(jobs, over)
        return False

    def _doubted(self, jobs: list[TransactionJob]) -> None:
        unknown = errors.KafkaTimeout("a commit was not confirmed: the next session finds out whether it succeeded")
        for job in jobs:
            job.results = [unknown] * job.record_count
            self._post(job)


class TransactionSession(TransactionalProducers):
    """Writes requests one transaction after the other, until the first that fails; after that all fail.

    The client is opened once, and the next session of the same name fences it. A session opens, then reads what earlier
    ones have committed, and then writes; so it repeats nothing of theirs. Results of a request that was not committed
    are errors; `KafkaTimeout` means that only the next session can find out. Source: KIP-98.
    """

    _writer = _SessionWriter
    _gauge = ""

    def __init__(self, admin: Admin, name: str, *, alone: bool = False) -> None:
        """Prepare; with `alone` there is one record per batch, which is slow."""
        settings = ProducerConfig(transactions=TransactionsConfig(producers=1))
        if alone:
            settings = settings.with_properties(_ALONE)
        super().__init__(admin.config, settings, name, f"session {name}", admin)


class GroupTransactions(TransactionalProducers):
    """Writes the transactions of one member of a group, one after the other, each with offsets of the group.

    An outcome in doubt raises `KafkaTimeout` when the next client is open. By then Kafka has ended the transaction, and
    the committed offsets of the group show how. Results of one that is certainly not committed name the culprits: each
    has its own error, and the others have `TransactionAborted`. A refusal with the parameter `OF_BATCH` may be of
    another record.
    """

    _gauge = ""
    _names_culprits = True

    def __init__(self, admin: Admin, settings: ProducerConfig, name: str, label: str) -> None:
        """Prepare; the next process with the same name fences this one."""
        one = settings.transactions.model_copy(update={"producers": 1})
        settings = settings.model_copy(update={"transactions": one})
        super().__init__(admin.config, settings, name, f"{label} transactions", admin)

    async def require_topic(self, topic: str) -> None:
        """Raise the error for a topic that does not exist, or that must not be written."""
        await self._admin.describe_topic(topic, "Write")

    async def _look_up(self, job: TransactionJob) -> None:
        job.fail(errors.KafkaTimeout("a commit was not confirmed: the offsets of the group show whether it succeeded"))
        self._settle(job, [job.problem or errors.KafkaTimeout()] * job.record_count)
