"""Operations of the audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace import errors
from headrace.telemetry.audit_notes import AuditNote
from headrace.web.operation import BODY, JSON, Operation
from headrace.web.routes.audit import ACTIVE_AUDIT, AuditedResult

AUDIT_OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("POST", ACTIVE_AUDIT): Operation(
        "ConsumerAudit",
        "Note what became of records that were fetched",
        {200: list[AuditNote]},
        request={JSON: list[AuditedResult]},
        example=[{"record": {"topic": "orders", "partition": 0, "offset": 7}, "processed": True, "key": "alice"}],
        errors=(*BODY, errors.AuditNotTaken, errors.ProducerQueueFull),
    ),
}
"""Every endpoint by method and path."""
