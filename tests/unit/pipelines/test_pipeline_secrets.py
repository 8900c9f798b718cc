"""TLS files and secrets of a driver: when they change, and what is left of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.runtime import Deadline, Service
from headrace_devkit.devcluster.certificates import Authority
from headrace_pipelines import driver_inputs, driver_protocol
from headrace_pipelines.connector import ConnectorSecurity, write_secrets
from headrace_pipelines.driver_process import Toolchain
from tests.pipeline_harness import READY, Started


def _login(password: str, ca: str = "") -> KafkaSecurity:
    sasl = {"mechanism": "SCRAM-SHA-512", "username": "app", "password": password}
    return KafkaSecurity.model_validate({"sasl": sasl, "tls": {"ca": ca}})


def text_of(secrets: Path) -> str:
    """Return the file without Java's escapes, which Python has too."""
    return secrets.read_text("ascii").encode().decode("unicode_escape")


async def test_changed_secrets_are_taken_up_between_micro_batches(started: Started, tmp_path: Path) -> None:
    """The driver is stopped as at a drain and starts again with the new secret; the run stays ready all the time."""
    Authority(tmp_path, "ca")
    kafka = KafkaConfig(security=_login("c4nary-1", str(tmp_path / "ca.pem")))
    secrets = tmp_path / "delays" / "secrets.properties"
    async with started(kafka) as harness:
        await harness.report(*READY)
        assert "c4nary-1" in text_of(secrets)
        assert "c4nary-1" not in harness.plans[0].model_dump_json()
        kafka.security.use(_login("c4nary-2", str(tmp_path / "none.pem")))
        await harness.clock.advance(10)
        assert (len(harness.drivers), harness.reason) == (1, "")
        kafka.security.use(_login("c4nary-2"))
        await harness.clock.advance(10)
        assert [driver.stops for driver in harness.drivers] == [1, 0]
        assert harness.reason == ""
        assert "c4nary-2" in text_of(secrets)
        harness.drivers[1].report(*READY)
        await harness.clock.advance(30)
        assert [driver.stops for driver in harness.drivers] == [1, 0]
        await harness.run.drain(Deadline(harness.clock, 5))
        assert not secrets.exists()


@pytest.mark.parametrize("moment", ["renewal", "start"])
async def test_no_secret_is_left_without_a_driver(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The driver ends while changed secrets are read, or the run ends while a driver starts."""
    Authority(tmp_path, "ca")
    kafka = KafkaConfig(security=_login("c4nary-1", str(tmp_path / "ca.pem")))
    async with started(kafka) as harness:

        async def failing(function: Callable[[], Any]) -> Any:
            harness.drivers[0].report(
                driver_protocol.Failed("UNRESOLVED_COLUMN", "no column x", False, "flows.by_carrier")
            )
            harness.drivers[0].end(1)
            await harness.clock.settle()
            assert harness.state == "failed"
            return function()

        async def endless(
            owner: Service, plan: driver_protocol.DriverPlan, _: Toolchain, security: ConnectorSecurity
        ) -> None:
            write_secrets(plan.folder, security.secrets)
            await asyncio.Event().wait()

        if moment == "renewal":
            monkeypatch.setattr(driver_inputs, "run_blocking", failing)
            kafka.security.use(_login("c4nary-2"))
            await harness.clock.advance(10)
        else:
            monkeypatch.setattr("headrace_pipelines.runs.DriverProcess.start", endless)
            await harness.end(1, 1)
            await harness.run.stop()
    assert not list((tmp_path / "delays").iterdir())
