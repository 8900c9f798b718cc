"""A feature of another package: one file and one registration give it a setting, an endpoint and a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_devkit.devcluster import Cluster
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing.scenario import Scenario

FEATURE_FILE = '''"""Greets."""

import click
import msgspec

from headrace.config.model import HeadraceConfig
from headrace.config.section import Section
from headrace.feature import CliCommand, Feature
from headrace.http.endpoint import OPEN, Call, Endpoint
from headrace.runtime import Readiness, Service
from headrace.runtime.feature_parts import Parts

FEATURE = Feature(
    name="greeting",
    section="headrace_greeting:GreetingSections",
    parts="headrace_greeting:GreetingParts",
    endpoints=["headrace_greeting:GreetingEndpoints"],
    commands={"greet": CliCommand("headrace_greeting:greet", "Greet.")},
    tags={"Greetings": ["/greeting"]},
    needs=["consumers"],
)


class GreetingConfig(Section):
    """How to greet."""

    text: str = "hello"
    """The greeting."""


class GreetingSections(HeadraceConfig):
    """The key that it adds to the file."""

    greeting: GreetingConfig = GreetingConfig()
    """How to greet."""


class Greeting(msgspec.Struct):
    """A greeting."""

    text: str


class GreetingEndpoints:
    """Greets over HTTP."""

    def __init__(self, text):
        self.text = text

    @Endpoint("GET", "/greeting", "greet", "A greeting", OPEN)
    async def greet(self, call: Call[None, None]) -> Greeting:
        return Greeting(self.text)


class GreetingParts(Parts):
    """The endpoint and a service."""

    def __init__(self, context, needed):
        self.endpoints = [GreetingEndpoints(context.config.section(GreetingSections).greeting.text)]

    def services(self):
        return [Service("greeter")]


@click.command()
def greet():
    """Greet."""
    click.echo("hello")
'''
REGISTRATION = "[headrace.features]\ngreeting = headrace_greeting:FEATURE\n"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Install the two files in a folder of their own; return the environment that has it."""
    (tmp_path / "headrace_greeting.py").write_text(FEATURE_FILE)
    metadata = tmp_path / "headrace_greeting-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-greeting\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(REGISTRATION)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def headrace(installed: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "headrace.cli.main", *words]
    done = subprocess.run(command, env=installed, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_command_and_its_section_are_known(installed: dict[str, str]) -> None:
    """In the help, as a command, and in the schema of the file."""
    assert "greet      Greet." in headrace(installed, "--help")
    assert headrace(installed, "greet") == "hello\n"
    schema = json.loads(headrace(installed, "config", "schema"))
    greeting = schema["properties"]["greeting"]
    assert (greeting["$ref"], greeting["description"]) == ("#/$defs/GreetingConfig", "How to greet.")
    assert schema["$defs"]["GreetingConfig"]["properties"]["text"]["description"] == "The greeting."


def test_its_endpoint_is_served_described_and_reads_its_setting(
    installed: dict[str, str], tmp_path: Path, kafka: Cluster
) -> None:
    """Its service starts and drains with the others."""
    (port,) = free_ports(1)
    settings = {
        "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
        "http": {"port": port},
        "greeting": {"text": "good morning"},
    }
    file = tmp_path / "headrace.yaml"
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "headrace.cli.main", "run", "-c", str(file)]
    with subprocess.Popen(command, env=installed, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert next(line for line in process.stdout if line.startswith("ready http="))
            assert Scenario.ask(f"http://127.0.0.1:{port}/greeting").body == {"text": "good morning"}
            assert Scenario.ask(f"http://127.0.0.1:{port}/openapi.json").body["paths"]["/greeting"]["get"]["tags"] == [
                "Greetings"
            ]
            assert "greeter" in Scenario.ask(f"http://127.0.0.1:{port}/health/readiness").body["services"]
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
