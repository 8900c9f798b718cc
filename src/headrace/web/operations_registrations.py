"""What the endpoints of registered consumers take and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace import errors
from headrace.web.operation import JSON, KAFKA, OWN_BODY, Operation
from headrace.web.routes.registrations import (
    REGISTRATION,
    REGISTRATIONS,
    RegistrationList,
    RegistrationSettings,
    RegistrationView,
    Removed,
)

REGISTRATION_OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("GET", REGISTRATIONS): Operation(
        "listRegistrations",
        "One's own registered consumers",
        {200: RegistrationList},
        errors=(errors.KafkaUnavailable,),
    ),
    ("GET", REGISTRATION): Operation(
        "showRegistration",
        "A registered consumer of one's own",
        {200: RegistrationView},
        errors=(errors.NotFound, errors.KafkaUnavailable),
    ),
    ("PUT", REGISTRATION): Operation(
        "register",
        "Register a reactive consumer, or change it",
        {200: RegistrationView, 201: RegistrationView},
        request={JSON: RegistrationSettings},
        example={"topics": ["orders"], "group": "billing", "backend": {"url": "http://localhost:8444/kafka/records"}},
        errors=(*OWN_BODY, *KAFKA, errors.RegistrationConflict, errors.RegistrationQuota),
    ),
    ("DELETE", REGISTRATION): Operation(
        "unregister",
        "Take a registered consumer away; its group keeps its offsets",
        {200: Removed},
        errors=(*KAFKA, errors.NotFound),
    ),
}
