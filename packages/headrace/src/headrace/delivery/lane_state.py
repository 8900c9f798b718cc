"""Why a partition does or does not move: one state and one reason.

State        new deliveries  reason
-----------  --------------  ------------------------------------------------------------------------
RUNNING      begin           empty
NOT_DUE      begin           the next record of a retry topic is not due
DELAYED      begin           the last failure, or the limit that is reached
BACKING_OFF  do not begin    dead letters are not written; a timer ends the state
STOPPED      do not begin    dead letters are off; an operator must act
PAUSED       do not begin    the reason given for the pause
DRAINING     do not begin    the pending seek; empty before a revoke
FENCED       do not begin    the seek whose commit is pending; results of deliveries in flight are ignored
"""

import enum
import logging

from headrace.records import TopicPartition
from headrace.runtime import Clock
from headrace.runtime.telemetry.log_fields import record_fields

log = logging.getLogger(__name__)

_STALLED_SECONDS = 5.0


class LaneState(enum.Enum):
    """State of one partition in one assignment; see the table above."""

    RUNNING = enum.auto()
    NOT_DUE = enum.auto()
    DELAYED = enum.auto()
    BACKING_OFF = enum.auto()
    STOPPED = enum.auto()
    PAUSED = enum.auto()
    DRAINING = enum.auto()
    FENCED = enum.auto()


_S = LaneState
_ENDS = (_S.DRAINING, _S.FENCED)
_BEGIN = (_S.RUNNING, _S.NOT_DUE, _S.DELAYED)
_TROUBLED = (_S.DELAYED, _S.BACKING_OFF, _S.STOPPED)
_NEXT: dict[LaneState, tuple[LaneState, ...]] = {
    _S.RUNNING: (_S.NOT_DUE, _S.DELAYED, _S.BACKING_OFF, _S.STOPPED, _S.PAUSED, *_ENDS),
    _S.NOT_DUE: (_S.RUNNING, _S.DELAYED, _S.BACKING_OFF, _S.STOPPED, _S.PAUSED, *_ENDS),
    _S.DELAYED: (_S.RUNNING, _S.NOT_DUE, _S.DELAYED, _S.BACKING_OFF, _S.STOPPED, _S.PAUSED, *_ENDS),
    _S.BACKING_OFF: (_S.DELAYED, _S.PAUSED, *_ENDS),
    _S.STOPPED: (_S.PAUSED, *_ENDS),
    _S.PAUSED: (_S.RUNNING, _S.PAUSED, *_ENDS),
    _S.DRAINING: (_S.DRAINING, _S.FENCED),
    _S.FENCED: (_S.FENCED,),
}
"""The allowed next states; a change to any other state is ignored."""


class LaneCondition:
    """The state of a lane, the reason, and since when it does not move."""

    def __init__(self, group: str, partition: TopicPartition, clock: Clock) -> None:
        """Begin running."""
        self.label = f"group {group}, {partition}"
        """Names the lane in the log."""
        self.log_fields = record_fields(group, partition)
        self.state = LaneState.RUNNING
        self.reason = ""
        """Why it does not move, in one sentence; empty while it moves."""
        self.may_begin = True
        """Whether deliveries may begin."""
        self._clock = clock
        self._since = 0.0
        self._logged = False

    def change(self, state: LaneState, reason: str = "") -> bool:
        """Change to a state if it may follow the current one; return whether it did.

        A stalled lane is logged when it fails again, and when it resumes.
        """
        if state not in _NEXT[self.state]:
            return False
        if state in _TROUBLED:
            if not self.in_trouble:
                self._since = self._clock.monotonic()
        elif self._logged:
            self._logged = False
            if state in _BEGIN:
                log.info("%s resumed", self.label, extra=self.log_fields)
        self.state, self.reason, self.may_begin = state, reason, state in _BEGIN
        if self.trouble and not self._logged:
            self._logged = True
            log.warning("%s is stalled: %s", self.label, reason, extra=self.log_fields)
        return True

    @property
    def in_trouble(self) -> bool:
        """Whether something failed or a limit is reached, and nothing has succeeded since."""
        return self.state in _TROUBLED

    @property
    def trouble(self) -> str:
        """The reason, once the lane has been in trouble for a while; else empty."""
        stalled = self.in_trouble and self._clock.monotonic() - self._since >= _STALLED_SECONDS
        return self.reason if stalled else ""

    @property
    def is_blocked(self) -> bool:
        """Whether the lane is blocked by dead letters that are not written."""
        return self.state is LaneState.BACKING_OFF or self.state is LaneState.STOPPED

    @property
    def is_ending(self) -> bool:
        """Whether the assignment ends, so that nothing begins."""
        return self.state is LaneState.DRAINING or self.state is LaneState.FENCED
