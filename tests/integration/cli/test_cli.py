"""The everyday commands as a user runs them, against a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headrace.config.kafka import SchemaRegistryConfig
from headrace.formats.registry import SchemaRegistry
from headrace.runtime import SystemClock
from headrace_devkit.testing import Cluster, MakeTopic, Registry
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import command_environment

COMMAND = [sys.executable, "-m", "headrace.cli.main"]
SCHEMA = '{"type":"record","name":"Order","fields":[{"name":"n","type":"int"}]}'


@pytest.fixture
def env(kafka: Cluster, tmp_path: Path) -> Mapping[str, str]:
    return {**command_environment(kafka.bootstrap_servers, tmp_path), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def headrace(site: Scenario) -> Callable[..., subprocess.CompletedProcess[str]]:
    return site.cli


def start(env: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*COMMAND, *words], cwd=env["PWD"], env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


POSITIONS = [
    ("--from +7", "789"),
    ("--from -2 --to -1", "8"),
    ("--from 3 --to 5 -p 0,0", "34"),
    ("-o 8 -n 1", "8"),
    ("--from @13000 --to 1970-01-01T00:00:15", "34"),
    ('--where "offset">8', "9"),
]


def test_records_are_chosen_printed_and_written_again(
    headrace: Callable[..., subprocess.CompletedProcess[str]], topic: MakeTopic, env: Mapping[str, str]
) -> None:
    """By positions, expressions, patterns and groups; as text, by a template and as JSON that `produce` takes."""
    name, copy = topic(retention_ms=-1), topic(retention_ms=-1)  # the records are old
    row = '{{"key":"k{0}","value":"{0}","timestamp":1{0}000,"headers":{{"n":"{0}"}}}}\n'
    headrace("produce", name, "--input", "ndjson", given="".join(map(row.format, range(10))))
    for words, values in POSITIONS:
        assert headrace("consume", name, *words.split()).stdout.split() == [*values], words
    assert headrace("consume", name, "--from", "+10").stderr == f"no such records in {name}\n"
    shown = headrace("consume", name, "--keys", "--times", "-n", "1").stdout
    assert shown == "1970-01-01T00:00:10.000+00:00\tk0\t0\n"
    assert (
        headrace("consume", name, "-f", r"%t-%p/%o %k:%s %h %T\n", "-o", "-1").stdout == f"{name}-0/9 k9:9 n=9 19000\n"
    )
    eight = "".join(headrace("consume", name, "--output", "json").stdout.splitlines(keepends=True)[:8])
    headrace("produce", copy, "--input", "ndjson", "-X", "compression.type=lz4", given=eight)
    both = [line.split() for line in headrace("consume", f"^{name}$", copy, "-f", r"%t %k %s %T\n").stdout.splitlines()]
    assert [line[1:] for line in both if line[0] == copy] == [line[1:] for line in both if line[0] == name][:8]
    group = ("--group", f"g-{name}")
    first = headrace("consume", name, *group, "-n", "4")
    assert (first.stdout.split(), "commits what was printed: at least once" in first.stderr) == ([*"0123"], True)
    assert headrace("consume", name, *group).stdout.split() == [*"456789"]
    assert headrace("consume", name, *group).stdout == ""
    headrace("produce", copy, "--keys", given="k\tv\n")
    headrace("produce", name, "-Z", "-k", "k0", given="\n")
    assert headrace("consume", name, "-o", "-1", "-f", r"%k %S\n").stdout == "k0 -1\n"


def test_a_format_is_found_and_a_terminal_is_safe(
    headrace: Callable[..., subprocess.CompletedProcess[str]],
    topic: MakeTopic,
    schema_registry: Registry,
    env: Mapping[str, str],
) -> None:
    """Values with a schema, text and bytes in one topic; escape sequences of a record reach no terminal."""
    name, registry = topic(message_timestamp_type="LogAppendTime"), ("--schema-registry", schema_registry.url)

    async def register() -> None:
        client = SchemaRegistry(SchemaRegistryConfig(url=schema_registry.url, timeout_seconds=60), SystemClock())
        await client.register(f"{name}-value", SCHEMA, "AVRO")
        await client.close()

    asyncio.run(register())
    headrace("produce", name, "--value-format", "avro", *registry, given='{"n":1}\n')
    headrace(
        "produce",
        name,
        "--input",
        "ndjson",
        given='{"value":"/wA=","value_format":"binary"}\n{"value":"\\u001b[2Jx"}\n',
    )
    assert headrace("consume", name, *registry).stdout == '{"n":1}\n\\xff\0\n\x1b[2Jx\n'
    rows = [json.loads(line) for line in headrace("consume", name, *registry, "--output", "json").stdout.splitlines()]
    assert [row["value"] for row in rows] == [{"n": 1}, "/wA=", "\x1b[2Jx"]
    found = [rows[0]["value_schema_id"] > 0, rows[1]["value_format"], rows[0]["timestamp_type"]]
    assert found == [True, "binary", "log_append_time"]
    assert headrace("consume", name, *registry, "--where", 'value.n = 1 OR "offset" = 1').stdout == '{"n":1}\n\\xff\0\n'
    terminal, inside = os.openpty()
    subprocess.run([*COMMAND, "consume", name, "--from", "-1"], cwd=env["PWD"], env=env, stdout=inside, check=True)
    assert os.read(terminal, 1000) == b"\\x1b[2Jx\r\n"
    os.close(terminal)
    os.close(inside)


def test_what_does_not_exist_is_named_in_one_paragraph(
    headrace: Callable[..., subprocess.CompletedProcess[str]], topic: MakeTopic, tmp_path: Path
) -> None:
    """Unknown topics, partitions and groups, bad names and a cluster that is down: one paragraph, exit code 1."""
    for words in (["produce", "nope"], ["consume", "nope"], ["topics", "describe", "nope"], ["dlq", "redrive", "nope"]):
        assert "topic nope does not exist" in headrace(*words, given="x\n", code=1).stderr
    assert "no partition 5: it has 0 to 0" in headrace("consume", topic(), "--partition", "5", code=1).stderr
    assert "group nope does not exist" in headrace("groups", "describe", "nope", code=1).stderr
    assert "no topic matches ^nope" in headrace("consume", "^nope", code=1).stderr
    (tmp_path / "headrace.yaml").write_text("kafka: {bootstrap_servers: 'localhost:1'}")
    failed = headrace("topics", "list", "-c", "headrace.yaml", code=1)
    assert re.sub(r"within 3\.\d s", "within 3 s", failed.stderr) == (
        "waiting up to 10 s for Kafka at localhost:1: connection refused by localhost:1\n"
        "list topics: no response from Kafka at localhost:1 within 3 s: connection refused by localhost:1. "
        "Start it (headrace dev up) or correct kafka.bootstrap_servers\n"
    )
    for words in (["consume", "x"], ["produce", "x"]):
        said = headrace(*words, "-b", "localhost:1", code=1).stderr
        assert re.search(r"within 3(\.\d)? s: connection refused by localhost:1", said)


def test_interrupted_commands_end_at_once(
    env: Mapping[str, str], headrace: Callable[..., subprocess.CompletedProcess[str]], topic: MakeTopic
) -> None:
    """Ctrl-C while waiting for lines or records: exit code 130, no traceback, and `produce` has counted its records."""
    name = topic()
    with start(env, "produce", name) as producing, start(env, "consume", name, "--follow") as following:
        assert producing.stdin
        assert following.stdout
        # The second line is sent after the first is acknowledged and counted; its own count may still be on its way.
        for line in ("one\n", "two\n"):
            producing.stdin.write(line)
            producing.stdin.flush()
            assert following.stdout.readline() == line
        producing.send_signal(signal.SIGINT)
        following.send_signal(signal.SIGINT)
        printed = producing.communicate(timeout=240)[1]
        assert following.communicate(timeout=240)[1] == "\ninterrupted\n"
    assert (producing.returncode, following.returncode) == (130, 130)
    assert re.match(f"stopped after (1 record|2 records) acknowledged in {name}:\n", printed)
    assert "Traceback" not in printed
