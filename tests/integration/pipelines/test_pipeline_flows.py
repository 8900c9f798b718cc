"""One pipeline with every kind of source, view, rule, handler, format and sink, on a real broker, registry and Spark.

Headrace and Spark show a certificate to Kafka. One driver runs all flows, and each test looks at some of them.
With `--all` there are also the flows of `more.yaml`, at which the long tests look.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
import json
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from headrace.config.kafka import KafkaConfig
from headrace.formats.avro import AvroCodec
from headrace.formats.plain import header_of, unframe
from headrace.formats.protobuf import ProtobufCodec
from headrace.records import Record
from headrace_devkit.testing import HeadraceProcess, RecordingBackend, Registry
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import SecuredCluster
from tests.integration.pipelines.test_pipelines import produce, records_of
from tests.postgres_server import PASSWORD, PostgresServer, binaries, postgres_server
from yaml_table import table

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 600.0
FILES = yaml.safe_load(Path(__file__).with_name("flows.yaml").read_text())
BEHIND = [text.encode() for text in table(__file__, "objects_with_something_after_them")]
"""Spark ignores what follows the object."""
WHOLE = [b'{"id": 300, "cents": 2}\n', b' {"id": 301, "cents": 2} ', b'{"id": 302, "cents": 2, "x": {"y": [{}, "}"]}}']
OTHERS = str(Path(__file__).parents[2] / "unit" / "queries" / "test_one_record.py")
"""Has values that are hard for tables of SQL, too."""
HOSTILE = [text.encode("utf-8", "surrogatepass") for name in ("fitting", "unfit") for text in table(OTHERS, name)]
HOSTILE += [b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}", b"\xff", b"x" * 100_000, b""]
NOT_PASSAGES = [b"{bad", b'{"id": "many"}', *BEHIND]
PRICED = {n: (n % 50 - 5) * (10 if n % 3 == 1 else 1) for n in range(300)} | dict.fromkeys(range(300, 303), 2)

GATE, CREW = table(__file__, "gate"), table(__file__, "crew")
PROTO = table(__file__, "proto")


def schema(*more: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "Flight", "fields": [*table(__file__, "fields"), *more]})


def trip(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "at": dt.datetime(2026, 1, 2, 3, 4, 5, 123456 + number, dt.UTC) if number % 2 else None,
        "day": dt.date(2026, 1, 1 + number),
        "fare": Decimal(f"{number}.10"),
        "raw": bytes([0, 255, number]),
        "speed": float("inf") if number == 3 else number / 2,
        "tags": {"n": 2**40 + number},
        **more,
    }


class Flows(NamedTuple):
    """The pipeline when it has read everything, and what it has left."""

    servers: str
    prefix: str
    folder: Path
    status: dict[str, dict[str, Any]]
    """Flow to its status."""
    not_trips: list[bytes]
    output: str
    backend: RecordingBackend
    postgres: PostgresServer | None

    def records(self, name: str) -> list[Record]:
        """Return the records of a topic."""
        return asyncio.run(records_of(KafkaConfig(bootstrap_servers=self.servers), f"{self.prefix}-{name}"))

    def by_key(self, name: str) -> dict[int, bytes]:
        """Return the values of a topic by their keys."""
        return {int(record.key or b""): record.value or b"" for record in self.records(name)}


def dead_letter(record: Record, header: str) -> str:
    return (dict(record.headers)[f"headrace.dlq.{header}"] or b"").decode()


@pytest.fixture(scope="module")
def flows(
    kafka_secured: SecuredCluster,
    schema_registry: Registry,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Flows]:
    """Run the pipeline until it has read everything; a third schema of its trips arrives while it runs."""
    servers, prefix, folder = kafka_secured.bootstrap_servers, f"f{uuid.uuid4().hex[:6]}", tmp_path_factory.mktemp("f")
    for name in ("passages", "flights", "trips", "visits", "hostile", "other"):
        kafka_secured.cluster.create_topic(f"{prefix}-{name}", 1 if name == "trips" else 2)

    def send(name: str, values: Iterable[bytes | None]) -> None:
        produce(servers, f"{prefix}-{name}", values)

    with SchemaRegistryClient({"url": schema_registry.url}) as client, contextlib.ExitStack() as stack:

        def register(name: str, text: str, kind: str = "AVRO") -> int:
            return int(client.register_schema(f"{prefix}-{name}-value", Schema(text, kind)))

        not_trips = send_all(send, register)
        backend = RecordingBackend()
        backend.start()
        stack.callback(backend.stop)
        postgres = stack.enter_context(postgres_server()) if binaries() else None
        file = write_files(folder, prefix, postgres, more=request.config.getoption("--all"))
        state = folder / "state"
        config: dict[str, Any] = {
            "pipelines": [str(file)],
            "state_dir": str(state),
            "schema_registry": {"url": schema_registry.url},
        }
        push = {"topics": [f"{prefix}-ids"], "group": prefix, "backend": {"url": backend.url}}
        config |= {"kafka": kafka_secured.certificate(), "reactive_consumers": {"ids": push}}
        process = HeadraceProcess(config, folder / "process")
        process.start()
        stack.callback(process.kill)
        process.wait_ready(LIMIT_SECONDS)
        counts = {"passages": 312, "hostile": 2 * len(HOSTILE), "flights": 302, "trips": 10, "visits": 240}
        wait_until_read(process, counts)
        newest = register("trips", schema(GATE, CREW))
        later = AvroCodec(schema(GATE, CREW)).encode_python(trip(6, gate="g6", crew=3))
        send("trips", [header_of(newest) + later])
        status = wait_until_read(process, counts | {"trips": 11})
        backend.wait_for(lambda b: len(b.accepted) >= 240, LIMIT_SECONDS)
        assert process.terminate() == 0
        yield Flows(servers, prefix, folder, status, not_trips, process.output, backend, postgres)


def send_all(send: Callable[[str, Iterable[bytes | None]], None], register: Callable[..., int]) -> list[bytes]:
    """Fill the topics of the sources. Returns the values that are not trips."""
    gates = [json.dumps({"id": n, "gate": f"g{n % 3}", "cents": n % 50 - 5}).encode() for n in range(300)]
    send("passages", [*gates, *WHOLE, *NOT_PASSAGES, None])
    flights = [json.dumps({"id": n, "carrier": f"C{n}", "arr_delay": float(n)}).encode() for n in range(300)]
    goods = [json.dumps({"seq": n, "a": "good", "k": [n]}).encode() for n, _ in enumerate(HOSTILE)]
    send("hostile", itertools.chain.from_iterable(zip(goods, HOSTILE, strict=True)))
    send("flights", [*flights, b"{bad", None])
    visit = {"at": "2026-01-01T10:00:00Z", "tags": ["a", None], "raw": "AAE="}
    send("visits", (json.dumps({"id": n, "gate": f"G{n % 4}", **visit}).encode() for n in range(240)))
    register("proto", PROTO, "PROTOBUF")
    register("plain", json.dumps(table(__file__, "json_schema")), "JSON")
    first, second = register("trips", schema()), register("trips", schema(GATE))
    of_first, of_second = AvroCodec(schema()), AvroCodec(schema(GATE))
    trips = [header_of(first) + of_first.encode_python(trip(n)) for n in range(3)]
    trips += [header_of(second) + of_second.encode_python(trip(n, gate=f"g{n}")) for n in range(3, 6)]
    not_trips = [b"{}", header_of(first) + b"\xff", header_of(2_000_000) + b"x"]
    send("trips", [*trips, *not_trips, None])
    return not_trips


def write_files(folder: Path, prefix: str, postgres: PostgresServer | None, *, more: bool) -> Path:
    """Write the pipeline and what it names. Returns its file."""
    shutil.copytree(ROOT / "examples" / "function", folder / "example")
    (folder / "out.avsc").write_text(schema(GATE))
    columns = f"seq INT, {table(OTHERS, 'tables')['typed']['schema']}"
    names = {"p": prefix, "folder": folder, "columns": columns}
    for name in ("prices.py", "gates.csv", "out.sql", "fares.py", "main.py"):
        (folder / name).write_text(FILES[name].format(**names) if name == "main.py" else FILES[name])
    document = yaml.safe_load(FILES["flows.yaml"].format(**names))
    if more:
        for section, parts in yaml.safe_load(FILES["more.yaml"].format(**names)).items():
            document[section] |= parts
    if postgres:
        postgres.execute(table(__file__, "gates_table"))
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o600)
        sink = postgres.sink("gates", "gate", password=f"${{file:{secret}}}")
        document["flows"]["gates"] = {"sql": table(__file__, "gates_sql"), "sink": sink}
    file = folder / "flows.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def wait_until_read(process: HeadraceProcess, counts: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Wait until each flow has read and done all of its source. Returns their status."""
    sources = {"ids": "visits", "gates": "visits", **dict.fromkeys(("out", "files", "passages-corrupt"), "passages")}
    sources |= dict.fromkeys(("hostile", "hostile-corrupt"), "hostile")
    sources |= dict.fromkeys(("several", "waits", "example"), "flights")
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        [pipeline] = Scenario.ask(f"{process.url}/adm/pipelines").body["pipelines"]
        found = pipeline["flows"]
        missing = {n for n, f in found.items() if f["inputRecords"] < counts[sources.get(n, "trips")]}
        if not missing:
            assert pipeline["restarts"] == 0
            return dict(found)
        assert time.monotonic() < end, (missing, pipeline)
        time.sleep(0.05)


def test_every_record_is_a_row_or_a_dead_letter_with_its_reason(flows: Flows) -> None:
    """A Python view joins a static table; rules count, drop and quarantine; corrupt records stay byte for byte. Only
    blanks may follow the object of a record."""
    broken = {n for n, cents in PRICED.items() if cents < 0}
    large = {n for n, cents in PRICED.items() if cents >= 400}
    even = sum(cents % 2 != 0 for cents in PRICED.values())
    assert flows.status["out"]["brokenRules"] == {"positive": len(broken), "small": len(large), "even": even}
    written = {n: json.loads(value)["cents"] for n, value in flows.by_key("out").items()}
    assert written == {n: cents for n, cents in PRICED.items() if n not in broken | large}
    quarantined = flows.records("out.dlq")
    assert {json.loads(record.value or b"")["id"] for record in quarantined} == broken
    assert dead_letter(quarantined[0], "error") == "RuleBroken"
    assert dead_letter(quarantined[0], "reason") == "the row breaks rule positive"
    corrupt = flows.records("passages.dlq")
    assert sorted(record.value or b"" for record in corrupt) == sorted(NOT_PASSAGES)
    assert {dead_letter(record, "topic") for record in corrupt} == {f"{flows.prefix}-passages"}
    head = "the value does not match the schema of passages: "
    assert {record.value: dead_letter(record, "reason") for record in corrupt} == {
        b"{bad": "the value is not a JSON object",
        b'{"id": "many"}': f'{head}id: "many" is not INT',
        **dict.fromkeys(BEHIND, f"{head}text follows the JSON object"),
    }


@pytest.mark.long
def test_files_have_what_a_topic_has(flows: Flows) -> None:
    """In a folder for each value of a column."""
    lines = [line for part in (flows.folder / "rows").rglob("*.json") for line in part.read_text().splitlines()]
    assert {row["id"]: row["cents"] for row in map(json.loads, lines)} == PRICED
    assert {folder.name for folder in (flows.folder / "rows").glob("odd=*")} == {"odd=0", "odd=1"}


@pytest.mark.long
def test_one_record_decides_about_itself(flows: Flows) -> None:
    """Between values that are hard to read each good one is a row, and of the others each is a row or a dead letter."""
    written = [json.loads(record.value or b"") for record in flows.records("hostile-out")]
    dead = [record.value for record in flows.records("hostile.dlq")]
    good = {row["seq"]: json.loads(row["row"]) for row in written if row.get("seq") is not None}
    assert good == {n: {"seq": n, "a": "good", "k": [n]} for n, _ in enumerate(HOSTILE)}
    assert len(written) + len(dead) == 2 * len(HOSTILE)
    assert {*dead} < {*HOSTILE}
    assert {text.encode() for text in table(OTHERS, "unfit") if text.startswith('{"j')} <= {*dead}


def test_handlers_write_any_number_of_records_and_dead_letters(flows: Flows) -> None:
    """Outputs, emitted records and dead letters; a failed record was tried twice; each worker is set up once."""
    expected = Counter({n: n % 3 for n in range(300) if n % 10 != 7 and n % 3})
    assert flows.status["several"]["brokenRules"] == {"failed": 32}
    found = flows.records("several")
    assert Counter(int(record.value or b"") for record in found) == expected
    assert all(record.key == b"k%d" % int(record.value or b"") for record in found)
    emitted = flows.records("other")
    assert Counter(json.loads(each.value or b"")["id"] for each in emitted) == Counter(range(8, 300, 10))
    assert {(each.key, *each.headers) for each in emitted} == {(b"emitted", ("h", b"x"))}

    dead = flows.records("several.dlq")
    sevens = [json.dumps({"id": n, "carrier": f"C{n}", "arr_delay": float(n)}).encode() for n in range(7, 300, 10)]
    assert Counter(each.value for each in dead) == Counter([*sevens, b"{bad", None])
    seven = next(each for each in dead if each.value == sevens[0])
    assert (dead_letter(seven, "attempts"), dead_letter(seven, "topic")) == ("2", f"{flows.prefix}-flights")
    assert dead_letter(seven, "reason") == "ValueError: seven"

    setups = (flows.folder / "setups").read_text().split()
    assert len(setups) == len(set(setups)) > 0


@pytest.mark.long
def test_an_async_handler_and_the_function_of_the_example_run(flows: Flows) -> None:
    """Its function.yaml is unmodified and reads a view; the records of a worker have its process."""
    responses = flows.records("waits")
    assert (len(responses), flows.status["waits"]["brokenRules"]) == (301, {"failed": 1})  # one value is not JSON
    setups = (flows.folder / "setups").read_text().split()
    assert {(dict(each.headers)["pid"] or b"").decode() for each in responses} <= set(setups)
    late = [json.loads(each.value or b"") for each in flows.records("example")]
    words = {row["id"]: row["arrival"] for row in late}
    assert words.keys() == {*range(1, 300, 2)}
    assert (words[1], words[17], words[61]) == ("a little late", "late", "very late")


@pytest.mark.long
def test_rows_are_values_of_each_format(flows: Flows) -> None:
    """Rows that do not fit a sink's schema become dead letters, and so do values that a handler's source refuses."""
    message = ProtobufCodec(PROTO, {}).decode(unframe(flows.by_key("proto")[5])[1])
    fields = {"id": "5", "at": "2026-01-02T03:04:05.123461Z", "raw": "AP8F", "fareAmount": 5.1, "gate": "g5"}
    assert json.loads(message) == fields
    objects = {n: json.loads(unframe(value)[1]) for n, value in flows.by_key("plain").items()}
    gates = [{}] * 3 + [{"gate": f"g{n}"} for n in range(3, 6)]
    assert objects == {n: {"id": n, "day": f"2026-01-0{n + 1}", **gates[n]} for n in range(6)}
    lines = {b"k%d %d" % (n, n) for n in range(6)} | {b"k0 6"}
    assert {each.value for each in flows.records("text")} == lines
    assert {each.value for each in flows.records("handled")} == {b"%d.10" % n for n in range(7)}

    [misfit] = flows.records("plain.dlq")
    assert json.loads(misfit.value or b"")["id"] == 6
    assert dead_letter(misfit, "error") == "EncodeError"
    assert "maximum" in dead_letter(misfit, "reason")
    dead = {each.value: dead_letter(each, "error") for each in flows.records("handled.dlq")}
    assert dead == {**dict.fromkeys(flows.not_trips, "DecodeError"), None: "TypeError"}


def test_rows_reach_a_table_and_a_backend(flows: Flows) -> None:
    """Every type arrives as it is; the newest row per key is in the table, each record is pushed once, and the
    password is neither in the status nor in a file of the run."""
    assert sorted(record["value"]["id"] for record in flows.backend.accepted) == list(range(240))
    if not flows.postgres:
        pytest.skip("no PostgreSQL here: install one, or pip install pgserver")
    newest = dt.datetime(2026, 1, 1, 10, tzinfo=dt.UTC)
    assert flows.postgres.execute("SELECT * FROM gates ORDER BY gate") == [
        (f"G{number}", 60, newest, ["a", None], b"\0\1", 0.6) for number in range(4)
    ]
    ((query, batch),) = flows.postgres.execute("SELECT query, next_batch FROM _headrace_batches")
    assert query.startswith("headrace.flows.gates.")
    assert batch >= 2
    kept = (file.read_text("latin-1") for file in (flows.folder / "state").rglob("*") if file.is_file())
    assert not any(PASSWORD in text for text in itertools.chain([flows.output, json.dumps(flows.status)], kept))
