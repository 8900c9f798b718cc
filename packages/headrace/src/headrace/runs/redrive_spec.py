"""Specification and result of a redrive, as they are stored and sent."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from headrace.delivery.dead_letter import MAX_REDRIVES, PREFIX, Origin, redriven_headers
from headrace.errors import InvalidRequest
from headrace.records import Header, OutgoingRecord, Record
from headrace.runs.dead_letters.origins import QUARANTINE
from headrace.runs.selection import Selection


class Target(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where dead letters go."""

    kind: Literal["origin", "quarantine", "drop"] = "origin"
    reason: str = ""
    """Why dead letters are dropped or in quarantine; stored with them."""

    @property
    def returns(self) -> bool:
        """Whether a record that is sent there may become a dead letter again."""
        return self.kind == "origin"

    def topic_for(self, source: str, origin: Origin) -> str:
        """Return the topic a dead letter goes to; empty for none."""
        if self.kind == "origin":
            return origin.partition.topic
        return source + QUARANTINE if self.kind == "quarantine" else ""

    def outgoing(self, record: Record, topic: str, own: Sequence[Header], origin: Origin) -> OutgoingRecord:
        """Return the record to write for a dead letter; `own` are the headers that its record had when it failed."""
        if self.kind == "quarantine":
            position = f"{record.topic}:{record.partition}:{record.offset}"
            headers = [
                *record.headers,
                (f"{PREFIX}quarantined_from", position.encode()),
                (f"{PREFIX}quarantined_why", self.reason.encode()),
            ]
            return OutgoingRecord(topic, record.key, record.value, headers, record.partition)
        headers = redriven_headers(own, origin)
        return OutgoingRecord(topic, record.key, record.value, headers, origin.partition.partition)


class RedriveOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How dead letters are sent."""

    dry_run: bool = False
    """Count what would be sent, and write nothing."""
    exactly_once: bool = False
    """Write records and completed offsets in one transaction: a run that is killed repeats nothing."""
    rate_records: float | None = None
    """Records per second at most."""
    max_redrives: int = MAX_REDRIVES
    """Dead letters whose record was already redriven this often are kept back: they would return forever."""
    from_origin: bool = False
    """Read the record at its origin where the dead letter holds no full copy of it."""
    stop_at_percent: float | None = None
    """Stop when more than this share of the dead letters fails."""
    by: str = ""
    """Who requested it; stored with the completed offsets."""


class RedriveSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which dead letters of a topic go where, and how.

    A job with fields that this version does not know does not run here.
    """

    topic: str
    select: Selection = Selection()
    target: Target = Target()
    options: RedriveOptions = RedriveOptions()
    topic_id: str = ""
    """Id of the topic at the time of the request; empty for any."""
    ends: dict[int, int] | None = None
    """Partition to the offset at which the run ends; None for the ends of the log at its start."""

    def check(self) -> None:
        """Raise InvalidRequest if dead letters of the topic would return to it."""
        if self.target.kind == "quarantine" and self.topic.endswith(QUARANTINE):
            raise InvalidRequest(f"{self.topic} is already a quarantine topic: redrive or drop its dead letters")


class Redriven(msgspec.Struct, frozen=True, rename="camel"):
    """The result of a run, or of a dry run."""

    records: int
    """Dead letters that were completed: sent, moved or dropped."""
    targets: Mapping[str, int]
    """Number of dead letters by the topic they were sent to."""
    errors: Mapping[str, int]
    """Number of dead letters by error class."""
    hours: Mapping[str, int]
    """Number of dead letters by the hour in which they were written: ISO 8601, UTC."""
    kept_back: int
    """Dead letters that are left because they were redriven too often."""
    too_large: Sequence[str]
    """Dead letters that are left because the target refuses them, each with the reason."""
    unproved: Mapping[str, int] = {}
    """Number of dead letters that are left because they may not go back, by reason."""
    failed_again: int = 0
    """Redriven records that became dead letters again during the run; counted with a limit of failures."""
    stopped: str = ""
    """Why the run stopped before its end."""
