"""Registrations: reactive consumers that teams add over HTTP."""

from headrace.feature import Feature

FEATURE = Feature(
    name="registrations",
    parts="headrace.sidecar.registered.registration_parts:RegistrationParts",
    endpoints=["headrace.commands.registration_routes:RegistrationEndpoints"],
    tags={"Registered consumers": ["/reactive-consumers"]},
    needs=["consumers", "commands", "reactive", "functions", "runs"],
)
