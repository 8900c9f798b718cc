"""The model of Kafka and its client against the real ones: each script gives a trace that the model gives too."""

from __future__ import annotations

import pytest

from headrace_devkit.simulation.calibration.scripts import SCRIPTS
from headrace_devkit.simulation.calibration.traces import explained, on_the_broker

LIMIT = pytest.mark.timeout(150, method="thread")
"""The slowest script takes 40 s. A call that never returns waits in C, so no signal ends it: this ends its worker."""
pytestmark = [pytest.mark.long, LIMIT]
AT_A_TIME = 5
"""The members mostly wait, and the topics of a script are its own."""


def _runs() -> list[object]:
    runs = [(name, protocol) for name, script in SCRIPTS.items() for protocol in script.protocols]
    found: list[object] = []
    for number, (name, protocol) in enumerate(runs):
        group = "kafka_three" if SCRIPTS[name].brokers == 3 else f"calibration-{number % AT_A_TIME}"
        found.append(pytest.param(name, protocol, id=f"{name}-{protocol}", marks=pytest.mark.xdist_group(group)))
    return found


@pytest.mark.parametrize(("name", "protocol"), _runs())
def test_the_model_does_what_the_broker_and_the_client_do(
    name: str, protocol: str, request: pytest.FixtureRequest
) -> None:
    cluster = request.getfixturevalue("kafka_three" if SCRIPTS[name].brokers == 3 else "kafka")
    assert explained(name, protocol, on_the_broker(name, protocol, cluster)) == ""
