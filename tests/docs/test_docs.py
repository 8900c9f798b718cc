"""The pages are true: made pages are up to date, links lead somewhere, examples run, names are complete."""

from __future__ import annotations

import ast
import asyncio
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from confluent_kafka.admin import AdminClient

from headrace.config.backend import BackendConfig
from headrace.config.consumers import RetryConfig
from headrace.config.load import load_config
from headrace.config.whole_file import WholeFile
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.errors import HeadraceError, catalogue
from headrace.formats.choice import Codecs
from headrace.functions.function_keys import read_keys_of
from headrace.functions.load import load_function
from headrace.records import Record
from headrace.runtime import SystemClock
from headrace.runtime.telemetry.metrics import BY_NAME
from headrace.sidecar.produce import produce_response
from headrace.sidecar.reactive.envelope import PayloadDecoder
from headrace.sidecar.reactive.http_destination import HttpDestination
from headrace_devkit.devcluster import Cluster
from headrace_devkit.devcluster.certificates import STORE_PASSWORD
from headrace_devkit.devcluster.jvm_server import Server
from headrace_devkit.devcluster.ports import free_ports, is_free
from headrace_devkit.devcluster.security import ClusterSecurity
from headrace_devkit.plan.rates import read_rates
from headrace_devkit.testing import RecordingBackend, StartHeadrace
from headrace_devkit.testing.secured import SecuredCluster
from headrace_pipelines.load import load_pipeline
from headrace_pipelines.spark_project import load_project
from headrace_pipelines.test_cases import load_test_case
from tests.docs.forked_commands import forked_commands
from tests.postgres_server import PostgresServer, binaries, postgres_server

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from docs.generate import pages  # noqa: E402 a plain folder, found from the repository's root

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").glob("*.md")])
CERTIFICATES = ("certs/ca.pem", "certs/headrace.pem", "certs/headrace.key")
EXAMPLES = {
    "headrace.yaml": lambda path: load_config(path, {}),
    "values.yaml": lambda path: load_config(path.parent, {}),
    "function.yaml": lambda path: load_function(path, WholeFile()),
    "rates.yaml": read_rates,
    "spark-pipeline.yaml": load_project,
}
BANNED = re.compile(
    r"\b(TODO|TBD|FIXME|simply|easily|seamless\w*|powerful|blazing\w*|robust|world-class|cutting-edge|lightning)\b"
    r"|(?<![\w.])/(home|root|Users|mnt|workspace)/\w",
    re.IGNORECASE,
)
RUNTIMES = {"js": "node", "java": "java", "go": "go"}
"""Languages of programs that other runtimes run."""
CLUSTERS = {
    "docs/operations.md": "kafka_three",
    "docs/topics.md": "kafka_three",
    "docs/security-kafka.md": "kafka_secured",
}
"""What a page's examples run on, where one broker is not enough."""
STARTS_CLUSTERS = re.compile(
    r"spark-submit |make |python3 -m venv |\.venv/bin/pip |eval |headrace (dev|demo)\b|export PATH="
)
"""Commands of the examples that make an environment or a cluster; other tests run them."""


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    text: str


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)]


def files_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of every file that a page shows; its first line is its name."""
    for block in blocks(page):
        if block.language in ("python", "yaml", "sql", *RUNTIMES):
            first = block.text.splitlines()[0]
            named = re.fullmatch(r"(?:#|//|--) ([\w./-]+\.(py|yaml|sql|mjs|java|go))", first)
            assert named, f"{name_of(page)}: this block does not begin with its file's name: {first}"
            yield named[1], block.text


def write_files(page: Path, folder: Path, ports: dict[str, int] | None = None) -> None:
    """Write the files of a page; parts of one YAML file are put together."""
    for name, text in files_of(page):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        for shown, port in (ports or {}).items():
            text = text.replace(shown, str(port))
        if name.endswith("headrace.yaml") and target.exists():
            text = yaml.safe_dump({**yaml.safe_load(target.read_text()), **yaml.safe_load(text)})
        target.write_text(text)


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block; a quote or a backslash goes on in the next line."""
    found: list[str] = []
    for line in block.text.splitlines():
        if found and (found[-1].endswith("\\") or found[-1].count("'") % 2 or line.startswith("  ")):
            found[-1] += "\n" + line
        elif line.strip():
            found.append(line)
    return found


def test_made_pages_are_up_to_date() -> None:
    """What `make docs` writes is what is there."""
    stale = [name_of(path) for path, text in pages().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run: make docs"


def test_the_layers_are_those_of_the_contract() -> None:
    """The architecture page and import-linter say the same."""
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    layers = contract["importlinter:contract:layers"]["layers"].strip()
    assert f"```text\n{layers}\n```" in text_of("docs/architecture.md")


def test_every_error_code_is_documented() -> None:
    """The page of codes has each code once, and the produce page each number of an outcome."""
    page = text_of("docs/reference/errors.md")
    codes = [error.code for error in catalogue() if error.__module__ == HeadraceError.__module__]
    assert [code for code in codes if page.count(f"| {code} |") != 1] == []
    produce = text_of("docs/produce.md")
    assert [
        code for code in {*produce_response._CODES.values(), produce_response._OTHER} if str(code) not in produce
    ] == []


def test_every_metric_that_a_page_names_exists() -> None:
    """Names of metrics are those of the catalogue; the page of upgrades names also those that are gone."""
    pages = [*({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs/upgrade.md"}), ROOT / "README.md"]
    names = {name for page in pages for name in re.findall(r"`(headrace_\w+)", page.read_text())}
    packages = {path.name for path in ROOT.glob("packages/*/src/*")}
    assert names - BY_NAME.keys() - packages - {"headrace_offsets"} == set()


def test_every_key_of_a_function_file_that_is_read_is_documented() -> None:
    """Trigger keys and attributes; those without effect are named in the log."""
    page = text_of("docs/function-reference.md") + text_of("docs/reference/function-keys.md")
    keys = [*read_keys_of("trigger"), *read_keys_of("attributes")]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_the_readme_has_the_lines_behind_every_target() -> None:
    """People without make find what a target runs."""
    readme, makefile = text_of("README.md"), text_of("Makefile")
    targets = re.findall(r"^(demo|test|test-all|check|bench|docs):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert len(targets) == 6
    lines = [
        line.strip().replace("$(BIN)", ".venv/bin").replace(" $(PART)", "")
        for _, body in targets
        for line in body.splitlines()
    ]
    assert [line for line in lines if line not in readme] == []
    assert [name for name, _ in targets if f"`make {name}`" not in readme] == []


def test_targets_named_in_the_pages_exist() -> None:
    """Nobody is sent to a target that is not there."""
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    found = {target for page in PAGES for target in re.findall(r"`make ([a-z-]+)`", page.read_text())}
    assert found - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file, and every anchor a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_have_plain_words_and_no_addresses(page: Path) -> None:
    """No praise, no leftovers, no path of one machine, and no host but this one."""
    text = page.read_text()
    assert [found[0] for found in BANNED.finditer(text)] == []
    hosts = set(re.findall(r"https?://([^/\s:\"'`)]+)", text))
    assert hosts <= {"localhost", "127.0.0.1"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_shown_load(page: Path, tmp_path: Path) -> None:
    """Every YAML file of a page loads, every Python file compiles, every JSON block is JSON."""
    for folder in {(tmp_path / name).parent for name, _ in files_of(page)}:
        for name in (
            "secret/kafka",
            "secret/loader",
            "secret/prometheus",
            "secret/shop",
            "secret/operators",
            "secret/cluster",
            *CERTIFICATES,
        ):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{file.name:->32}")
            file.chmod(0o600)
    write_files(page, tmp_path)
    if ".headrace/dev/kafka/security/" in page.read_text():
        ClusterSecurity(tmp_path / ".headrace/dev/kafka/security").prepare()
        (tmp_path / "secret/store").touch(0o600)
        (tmp_path / "secret/store").write_text(STORE_PASSWORD)
    for name, text in files_of(page):
        path = tmp_path / name
        if path.suffix == ".yaml":
            load = load_test_case if path.parent.name == "tests" else EXAMPLES.get(path.name, load_pipeline)
            assert load(path), name
        elif path.suffix == ".py":
            assert compile(text, name, "exec")
    for block in blocks(page):
        if block.language == "json":
            assert json.loads(block.text) is not None


def test_files_of_the_examples_are_shown_as_they_are() -> None:
    """A reader who copies them from the page has the same."""
    shown = dict(files_of(ROOT / "docs" / "audit-postgres.md"))
    examples = {path.name: path.read_text() for path in (ROOT / "packages/headrace-pipelines/examples/audit").iterdir()}
    assert examples == {name: shown[name] for name in examples}


BACKENDS = [
    ("results", "python backend.py"),
    ("status", "python backend.py"),
    ("single", "python single/backend.py"),
    ("cloudevents_structured", "python events/backend.py"),
    ("cloudevents_binary", "python events/backend.py"),
    pytest.param("results", "node backend.mjs", marks=pytest.mark.long),
    pytest.param("status", "java Backend.java", marks=pytest.mark.long),
    pytest.param("results", "go run backend.go", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("mode", "command"), BACKENDS)
def test_the_backends_shown_take_what_their_mode_sends(mode: Any, command: str, tmp_path: Path) -> None:
    """Each tiny backend of the push page, asked as a reactive consumer does; the deliveries shown are what it gets."""
    program, *words = command.split()
    if not (found := sys.executable if program == "python" else shutil.which(program)):
        pytest.skip(f"{program} is not installed")
    page = ROOT / "docs" / "push.md"
    port = free_ports(1)[0]
    write_files(page, tmp_path, {"8444": port})
    server = Server("backend", tmp_path / "backend.log")
    server.start([found, *words], detached=False, cwd=tmp_path)
    try:
        server.wait_until(lambda: not is_free(port), 60)
        codecs = Codecs(None)  # type: ignore[arg-type]
        stored = PayloadDecoder(codecs.for_reading("string"), "string", codecs.for_reading("json"), "json")
        backend = BackendConfig(url=f"http://127.0.0.1:{port}/", mode=mode)
        record = Record("parcels", 0, 0, 1767225600000, b"p1", b'{"grams": 250}')
        delivery = Delivery("tracking", record.topic_partition, 1, [record], 1)

        posted: list[bytes] = []

        async def deliver() -> list[Reply]:
            destination = HttpDestination("backend", backend, RetryConfig(), stored, SystemClock())
            post = destination.client.post
            destination.client.post = lambda body, lines=b"": posted.append(body) or post(body, lines)
            outcomes = await destination.deliver(delivery)
            await destination.stop()
            return list(outcomes)

        assert asyncio.run(deliver()) == [ACK]
    finally:
        server.kill()
    shown = [json.loads(block.text) for block in blocks(page) if block.language == "json"]
    if mode in ("results", "cloudevents_structured"):
        assert json.loads(posted[0]) in shown


def test_what_the_control_page_quotes_is_said() -> None:
    """Every sentence for a partition that stands still is one of the source."""
    said = "\n".join(
        node.value
        for path in ROOT.glob("packages/*/src/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    section = text_of("docs/control.md").split("## Why a partition does not move")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
    assert len(quoted) > 10
    assert [text for text in quoted for part in text.split("…") if part.strip(": ") not in said] == []


def emptied(cluster: Any) -> Any:
    """Return a cluster without what another page, or a first try, has left in it: examples have fixed names."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})

    def topics() -> list[str]:
        return [name for name in admin.list_topics(timeout=60).topics if not name.startswith("__")]

    if left := topics():
        for future in admin.delete_topics(left).values():
            future.result(60)
    end = time.monotonic() + 60
    while topics():
        assert time.monotonic() < end, "topics that were deleted are still there"
        time.sleep(0.05)
    return cluster


@pytest.fixture
def background() -> Iterator[Callable[[str, Path, dict[str, str]], None]]:
    """Start programs of a page that run beside its other commands: `background(command, folder, env)`."""
    started: list[Server] = []

    def start(command: str, folder: Path, env: dict[str, str]) -> None:
        started.append(Server(command, folder / f"background-{len(started)}.log"))
        started[-1].start(command.split(), detached=False, cwd=folder, env=env)

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of the test."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the start of a `PATH` for the commands of the pages."""
    with forked_commands(tmp_path_factory.mktemp("bin")) as folder:
        of_postgres = [str(found)] if (found := binaries()) else []
        yield os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"], *of_postgres])


def services_for(page: Path, folder: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the variables of the servers that a page's examples use; a secured cluster has its files in the folder."""
    kafka = request.getfixturevalue(CLUSTERS.get(name_of(page), "kafka"))
    if isinstance(kafka, Cluster):
        kafka.start()  # three brokers stop behind the last test that names them
    services = {"KAFKA": emptied(kafka).bootstrap_servers}
    if isinstance(kafka, SecuredCluster):
        cluster, token_url = kafka.cluster, kafka.tokens.token_url
        services |= {"KAFKA_SASL_SSL": cluster.sasl_servers, "KAFKA_SSL": cluster.tls_servers, "TOKEN_URL": token_url}
        (folder / ".headrace/dev/kafka").mkdir(parents=True)
        (folder / ".headrace/dev/kafka/security").symlink_to(kafka.security.folder)
    if "SCHEMA_REGISTRY_URL" in page.read_text():
        services["SCHEMA_REGISTRY_URL"] = request.getfixturevalue("schema_registry").url
    if "\npsql " in page.read_text():
        services |= request.getfixturevalue("postgres").environment
    return services


ALWAYS = ("README.md", "docs/operations.md")
"""The pages whose examples run in every test run."""
LONG = {page: [] if name_of(page) in ALWAYS else [pytest.mark.long] for page in PAGES}
TOGETHER = {page: [pytest.mark.xdist_group(CLUSTERS[page])] for page in CLUSTERS}  # with the other tests on the brokers
RUN = [
    pytest.param(page, marks=[*LONG[page], *TOGETHER.get(name_of(page), [])], id=name_of(page))
    for page in PAGES
    if any(block.language == "sh" for block in blocks(page))
]


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN)
def test_commands_shown_do_what_the_page_says(
    page: Path,
    tmp_path: Path,
    headrace: StartHeadrace,
    backend: RecordingBackend,
    background: Callable[[str, Path, dict[str, str]], None],
    programs: str,
    request: pytest.FixtureRequest,
) -> None:
    """Every shell block is run in a folder with the page's files; a text block behind it is what it prints."""
    if not any(runs(command) for block in blocks(page) if block.language == "sh" for command in commands(block)):
        pytest.skip("every command of this page starts a cluster or makes an environment")
    folder = tmp_path / "headrace-0"  # where the fixture writes headrace.yaml
    folder.mkdir()
    has_backend = "\npython backend.py &" in page.read_text()
    services = services_for(page, folder, request)
    # Behind the start of the brokers, which takes so long that another server could get the port meanwhile.
    ports = {"8444": free_ports(1)[0] if has_backend else int(re.search(r":(\d+)/", backend.url)[1])}
    write_files(page, folder, ports)
    others = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE")}
    env = {**others, **services, "PATH": programs}
    printed, skipped = "", set()
    for block in blocks(page):
        if block.language == "text" and printed:
            assert is_as_shown(printed, block.text), f"it printed\n{printed}\nand the page shows\n{block.text}"
        printed = ""
        for command in commands(block) if block.language == "sh" else ():
            if command.startswith("headrace run --"):  # with a program, or for development
                port = free_ports(1)[0]
                env["HEADRACE__HTTP__PORT"] = str(port)
                if command.endswith(" &"):
                    env["HEADRACE_URL"] = f"http://127.0.0.1:{port}"
            if command.startswith("headrace run -c"):
                config = yaml.safe_load((folder / "headrace.yaml").read_text())
                process = headrace(config, env=services)
                ports["8082"] = int(process.url.rpartition(":")[2])
                env["HEADRACE_URL"] = process.url
            elif (program := command.split()[0]) in RUNTIMES.values() and not shutil.which(program):
                skipped.add(program)
            elif command.endswith(" &"):
                background(command.removesuffix(" &"), folder, env)
            elif runs(command):
                for shown, port in ports.items():
                    command = command.replace(f"localhost:{shown}", f"localhost:{port}")
                printed += run(command, folder, env)
    if not has_backend and f":{ports['8444']}" in "".join(path.read_text() for path in folder.glob("headrace.yaml")):
        check_delivered(page, backend)
    if skipped:
        pytest.skip(f"not installed, so their programs were not run: {', '.join(sorted(skipped))}")


def check_delivered(page: Path, backend: Any) -> None:
    """The backend has the deliveries that the page shows, but for what differs each time."""
    backend.wait_for(lambda b: len(b.accepted) > 0)
    for shown in delivered_in(page):
        found = {**shown, **{name: backend.accepted[0][name] for name in ("timestamp", "headers", "epoch")}}
        assert backend.accepted[0] == found


def delivered_in(page: Path) -> list[Any]:
    """Return the deliveries a page shows."""
    found = [json.loads(block.text) for block in blocks(page) if block.language == "json"]
    return [record for body in found if isinstance(body, list) for record in body if "deliveryId" in record]


def is_as_shown(printed: str, shown: str) -> bool:
    """Compare lines; how wide a column is does not matter, and `…` stands for anything."""

    def lines_of(text: str) -> str:
        return "\n".join(re.sub(r"(?<=\S) {2,}", "  ", line).rstrip() for line in text.splitlines())

    pattern = ".*".join(map(re.escape, lines_of(shown).split("…")))
    return re.fullmatch(pattern, lines_of(printed)) is not None


def runs(command: str) -> bool:
    return not STARTS_CLUSTERS.match(command)


def run(command: str, folder: Path, env: dict[str, str]) -> str:
    def done(command: str) -> subprocess.CompletedProcess[str]:
        shell = ["bash", "-euo", "pipefail", "-c", command]
        return subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)

    try:
        end = done(command)
    except subprocess.TimeoutExpired:
        asked = re.match(r"until ([^|;]+)", command)
        logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in folder.glob("*.log"))
        pytest.fail(f"{command}\nhas not ended{f'; {asked[1]}says {done(asked[1])}' if asked else ''}\n{logs}")
    assert end.returncode == 0, f"{command}\n{end.stdout}{end.stderr}"
    return end.stdout
