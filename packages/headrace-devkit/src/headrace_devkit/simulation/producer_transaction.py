"""The transaction of one client, as librdkafka runs it: what each call waits for, and how it fails.

| State | until | then |
|---|---|---|
| init, wait_pid | the coordinator gives a producer id and epoch | ready_not_acked, and ready when the call returns |
| ready | `begin_transaction` | in_transaction |
| in_transaction | `commit_transaction`, `abort_transaction`, or an error | begin_commit, begin_abort, abortable_error |
| begin_commit, begin_abort | each record has its report | committing, aborting |
| committing, aborting | the coordinator has ended it | commit_not_acked, abort_not_acked, then ready |
| abortable_error | `abort_transaction` | begin_abort |
| fatal_error | never | |

Source: librdkafka, `rdkafka_txnmgr.c`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, Protocol

from confluent_kafka import KafkaError, KafkaException

from headrace_devkit.simulation.broker_transactions import BrokerTransactions
from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.coordinator_requests import (
    BUSY,
    FATAL,
    FENCES,
    LOST,
    MOVED,
    NEEDS_EPOCH,
    CoordinatorRequests,
    GroupMemberId,
    RequestCounter,
    TransactionOffsets,
    TransactionPartitions,
    error_that_aborts,
    normal_code,
)
from headrace_devkit.simulation.greenlet_threads import Waiter
from headrace_devkit.simulation.offsets import CommittedOffset, Partition
from headrace_devkit.simulation.producer_sender import Sender
from headrace_devkit.simulation.transaction_coordinator import ProducerEpoch

ClientState = Literal[
    "init",
    "wait_pid",
    "ready_not_acked",
    "ready",
    "in_transaction",
    "begin_commit",
    "committing",
    "commit_not_acked",
    "begin_abort",
    "aborting",
    "abort_not_acked",
    "abortable_error",
    "fatal_error",
]
_NAMES: Final[Mapping[str, str]] = {
    "init": "Init",
    "wait_pid": "WaitPID",
    "ready_not_acked": "ReadyNotAcked",
    "ready": "Ready",
    "in_transaction": "InTransaction",
    "begin_commit": "BeginCommit",
    "committing": "CommittingTransaction",
    "commit_not_acked": "CommitNotAcked",
    "begin_abort": "BeginAbort",
    "aborting": "AbortingTransaction",
    "abort_not_acked": "AbortedNotAcked",
    "abortable_error": "AbortableError",
    "fatal_error": "FatalError",
}
_PID_RETRY_SECONDS: Final = 0.5
_FOR_EVER: Final = 1e9
_LATE: Final = "Timed out waiting for operation to finish, retry call to resume"


class TransactionOwner(RequestCounter, Protocol):
    """What a transaction needs of its client."""

    def fail_for_good(self, code: int, text: str) -> None:
        """Take a fatal error."""

    def flush(self, timeout: float = -1) -> int:
        """Wait until each record has its report; return how many have none."""


class _TransactionCall:
    """A call of the application that waits for its result."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiter = Waiter()
        self.is_done = False
        self.error: KafkaError | None = None

    def finish(self, error: KafkaError | None = None) -> None:
        if not self.is_done:
            self.is_done, self.error = True, error
            self.waiter.wake()


class _CurrentTransaction:
    """What is counted in one transaction."""

    def __init__(self) -> None:
        self.failed_reports = 0
        self.bumps = False
        """Whether the next epoch is needed after the abort."""
        self.requests = 0
        """Those that have made the coordinator begin it, perhaps."""


class ClientTransaction:
    """The transactions of one client. Calls of the application block, and run on a thread of the machine."""

    def __init__(
        self,
        name: str,
        timeout_seconds: float,
        cluster: ClientCluster,
        transactions: BrokerTransactions,
        owner: TransactionOwner,
        request_seconds: float,
    ) -> None:
        # For good
        self.name = name
        self.timeout_seconds = timeout_seconds
        self._transactions = transactions
        self._owner = owner
        self._coordinator = CoordinatorRequests(name, cluster, owner, request_seconds)
        self.sender: Sender
        # For one transaction
        self.state: ClientState = "init"
        self.error = KafkaError(KafkaError.NO_ERROR)
        """Of the state abortable_error or fatal_error."""
        self.current = _CurrentTransaction()
        self._partitions = TransactionPartitions(cluster, self)
        # For one call
        self._call: _TransactionCall | None = None
        self._open_error = 0

    # Calls of the application ----------------------------------------------------------------------------------------

    def open(self, seconds: float) -> None:
        self._require("init", "wait_pid", "ready_not_acked")
        call = self._begin("init_transactions")
        if self.state == "init":
            self.state = "wait_pid"
            self.sender.need_producer()
        elif self.state == "ready_not_acked":
            call.finish()
        if not self._wait(call, 2 * self.timeout_seconds if seconds < 0 else seconds):
            code = self._open_error or int(KafkaError._TIMED_OUT)
            text = f"Failed to initialize Producer ID: {KafkaError(code).str()}" if self._open_error else _LATE
            raise KafkaException(KafkaError(code, text, retriable=True))
        self.state = "ready"

    def begin(self) -> None:
        self._check_call("begin_transaction")
        self._require("ready")
        self.state = "in_transaction"
        self.current = _CurrentTransaction()
        self.sender.wake()

    def send_offsets(self, offsets: Mapping[Partition, CommittedOffset], member: GroupMemberId, seconds: float) -> None:
        if not offsets:
            return
        self._require("in_transaction")
        call = self._begin("send_offsets_to_transaction")
        limit = self.timeout_seconds if seconds < 0 else min(seconds, self.timeout_seconds)
        self.current.requests += 1
        TransactionOffsets(self, self._coordinator, self._transactions, offsets, member).send(limit, call.finish)
        self._wait(call, _FOR_EVER)

    def commit(self, seconds: float) -> None:
        self._check_call("commit_transaction")
        self._require("in_transaction", "begin_commit", "committing", "commit_not_acked")
        if self.state == "in_transaction":
            self.state = "begin_commit"
        self._flush(seconds)
        self._require("begin_commit", "committing", "commit_not_acked")
        call = self._begin("commit_transaction")
        if self.current.failed_reports:
            text = f"{self.current.failed_reports} message(s) failed delivery (see individual delivery reports)"
            self.must_abort(KafkaError._INCONSISTENT, text, bumps=False)
            self._raise()
        self._end(call, committed=True, seconds=seconds)

    def abort(self, seconds: float) -> None:
        self._check_call("abort_transaction")
        self._require("in_transaction", "begin_abort", "aborting", "abortable_error", "abort_not_acked")
        if self.state in ("in_transaction", "abortable_error"):
            self.state = "begin_abort"
            self._partitions.clear_pending()
        self.sender.purge(in_queue=True, in_flight=False, aborts=True)
        self._flush(seconds)
        self._require("begin_abort", "aborting", "abort_not_acked")
        self._end(self._begin("abort_transaction"), committed=False, seconds=seconds)

    def _flush(self, seconds: float) -> None:
        if left := self._owner.flush(seconds):
            text = f"Failed to flush all outstanding messages within the API timeout: {left} message(s) remaining"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, text, retriable=True))

    def _end(self, call: _TransactionCall, *, committed: bool, seconds: float) -> None:
        if self.state in ("begin_commit", "begin_abort"):
            if not self.current.requests:
                self._ended(committed)
            elif self.sender.state in ("assigned", "waits_for_abort"):
                self.state = "committing" if committed else "aborting"
                self._send_end(self.producer, committed)
        elif self.state in ("commit_not_acked", "abort_not_acked"):
            call.finish()
        if not self._wait(call, seconds):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, _LATE, retriable=True))
        self._partitions.clear()
        self.current.requests = 0
        self.state = "ready"

    def _send_end(self, producer: ProducerEpoch, committed: bool) -> None:
        end = lambda broker: self._transactions.end(broker, self.name, producer, committed=committed)  # noqa: E731
        self._coordinator.send("EndTxn", end, functools.partial(self._end_answered, committed))

    def _end_answered(self, committed: bool, response: Any, again: Callable[[], None]) -> None:
        call = self._call
        kind = "commit" if committed else "abort"
        code = response.code() if isinstance(response, KafkaError) else 0
        if self.state == "abortable_error" and call:
            call.finish(error_that_aborts(self.error.code(), f"EndTxn after {self.error.str()}"))
            return
        if self.state not in ("committing", "aborting"):
            return
        if code in LOST or code in MOVED or code in BUSY:
            again()
        elif code in FATAL:
            self.fail(code, f"Failed to end transaction: {KafkaError(code).str()}")
        elif code:
            text = f"EndTxn {kind} failed: {KafkaError(code).str()}"
            if code in NEEDS_EPOCH and not committed:
                self.sender.bump_after_abort()
                return
            if not committed:
                self.state = "begin_abort"
            self.must_abort(code, f"Failed to end transaction: {KafkaError(code).str()}", bumps=code in NEEDS_EPOCH)
            if call:
                call.finish(error_that_aborts(code, text))
        else:
            self._ended(committed)

    def _ended(self, committed: bool) -> None:
        if self.current.bumps:
            self.current.bumps = False
            self.sender.bump_after_abort()
            return
        self.state = "commit_not_acked" if committed else "abort_not_acked"
        if self._call:
            self._call.finish()

    def _begin(self, name: str) -> _TransactionCall:
        """Begin a call of the application, or continue the one of this name that has timed out."""
        if self._call is None or self._call.name != name:
            self._call = _TransactionCall(name)
        return self._call

    def _check_call(self, name: str) -> None:
        """Refuse a call while one of another name has timed out, and must be called again."""
        if self._call is not None and self._call.name != name:
            text = f"Conflicting {self._call.name} API call is already in progress"
            raise KafkaException(KafkaError(KafkaError._CONFLICT, text, retriable=True))

    def _wait(self, call: _TransactionCall, seconds: float) -> bool:
        """Wait for the result of a call; return whether there is one, and raise it if it is an error."""
        if not call.is_done:
            call.waiter.wait(_FOR_EVER if seconds < 0 else seconds)
        if call.is_done and self._call is call:
            self._call = None
        if call.error is not None:
            raise KafkaException(call.error)
        return call.is_done

    def _require(self, *states: ClientState) -> None:
        if self.state not in states:
            self._raise()

    def _raise(self) -> NoReturn:
        self._call = None
        if self.state == "fatal_error":
            raise KafkaException(KafkaError(self.error.code(), self.error.str(), fatal=True))
        if self.state == "abortable_error":
            raise KafkaException(error_that_aborts(self.error.code(), self.error.str()))
        raise KafkaException(KafkaError(KafkaError._STATE, f"Operation not valid in state {_NAMES[self.state]}"))

    # What the sender asks and says -----------------------------------------------------------------------------------

    def may_send(self, key: Partition) -> bool:
        """Whether records of a partition may be sent: in a transaction that has it. Else it is added."""
        if self.state not in ("in_transaction", "begin_commit"):
            return False
        return self._partitions.has(key)

    def must_abort(self, code: int, text: str, *, bumps: bool) -> bool:
        """Take an error after which the transaction can only be aborted."""
        self.current.bumps |= bumps
        if self.state in ("in_transaction", "begin_commit", "committing"):
            self.state = "abortable_error"
            self.error = KafkaError(normal_code(code), text)
            self.sender.purge(in_queue=True, in_flight=False, aborts=True)
        return True

    def failed(self, code: int, text: str) -> None:
        """Take a fatal error."""
        self.state = "fatal_error"
        self.error = KafkaError(code, text)
        if self._call:
            self._call.finish(KafkaError(code, text, fatal=True))

    def fail(self, code: int, text: str) -> None:
        """Take an error of a request that is fatal."""
        self._owner.fail_for_good(normal_code(code), text)

    def request_producer(self, expected: ProducerEpoch | None) -> None:
        """Get the producer id, or after an error its next epoch."""
        name, timeout = self.name, self.timeout_seconds
        open_ = lambda broker: self._transactions.open(broker, name, timeout, expected)  # noqa: E731

        def answered(response: Any, again: Callable[[], None]) -> None:
            if not isinstance(response, KafkaError):
                self.sender.assigned(response)
                self._assigned()
                return
            code = response.code()
            text = f"Failed to acquire transactional PID: {response.str()}"
            if code in FENCES:
                self.fail(code, f"Producer fenced by newer instance: {text}")
            elif code in (KafkaError.INVALID_TRANSACTION_TIMEOUT, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED):
                self.fail(code, text)
            else:
                self._open_error = code
                again()

        self._coordinator.send("InitProducerId", open_, answered, pause_seconds=_PID_RETRY_SECONDS)

    def _assigned(self) -> None:
        if self.state == "wait_pid":
            self.state = "ready_not_acked"
        elif self.state in ("begin_abort", "aborting"):
            self.state = "abort_not_acked"
        else:
            return
        if self._call:
            self._call.finish()

    @property
    def producer(self) -> ProducerEpoch:
        assert self.sender.producer
        return self.sender.producer

    def wake(self) -> None:
        self.sender.wake()

    # Partitions ------------------------------------------------------------------------------------------------------

    def add_partitions(self, keys: Sequence[Partition], answered: Callable[[int], None]) -> None:
        """Have the coordinator add partitions; `answered` gets 0, or the error code of a refusal that may pass."""
        producer = self.producer
        self.current.requests += 1
        add = lambda broker: self._transactions.add(broker, self.name, producer, keys)  # noqa: E731

        def received(response: Any, _again: Callable[[], None]) -> None:
            code = response.code() if isinstance(response, KafkaError) else 0
            if self.state not in ("in_transaction", "begin_commit"):
                return
            text = f"Failed to add partitions to transaction: {KafkaError(code).str()}"
            if code in FATAL:
                self.fail(code, text)
            elif code in NEEDS_EPOCH:
                self.sender.state = "waits_for_abort"
                self.must_abort(code, text, bumps=True)
            elif code and code not in (*LOST, *MOVED, *BUSY, KafkaError.UNKNOWN_TOPIC_OR_PART):
                self.must_abort(code, text, bumps=False)
            else:
                answered(code)

        self._coordinator.send("AddPartitionsToTxn", add, received)
