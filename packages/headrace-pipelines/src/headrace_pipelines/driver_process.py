"""One driver process: what it needs of this machine, its start, its events and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.errors import EnvironmentProblem, PipelineInvalid
from headrace.extras import require
from headrace.runtime import ChildProcess, Deadline, Service, child_environment, run_blocking
from headrace.runtime.memory import machine_bytes
from headrace_jvm import ClassArchive, Progress, ensure_artifacts, find_java
from headrace_pipelines.connector import ConnectorSecurity, write_secrets
from headrace_pipelines.driver_protocol import MOST_RESPONSE_BYTES, AnyEvent, DriverPlan
from headrace_pipelines.spec import PipelineSpec

log = logging.getLogger(__name__)

_SPARK_VERSION = "4.2.0"
_JAVA_VERSION = 17
_GIB = 1 << 30
_OVERHEAD_BYTES = _GIB // 2
# People set these for other installations of Spark; this one must not use them.
_FOREIGN = re.compile(
    "SPARK_(HOME|CONF_DIR|REMOTE|API_MODE|CONNECT_MODE_ENABLED)|PYSPARK_(SUBMIT_ARGS|GATEWAY_PORT|DRIVER_PYTHON)"
)


class Toolchain(NamedTuple):
    """Java and the jars that were found."""

    jars: tuple[Path, ...]
    archive: ClassArchive | None
    """The class-data archive of that Java, which `headrace pipeline prepare` creates. None without a JVM."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the JVM that use it."""
        return self.archive.flags if self.archive else ()

    def environment(self, scratch: Path, hidden: Collection[str] = ()) -> dict[str, str]:
        """Return the environment of a driver process whose temporary files go to `scratch`, without `hidden` values."""
        own = {name: value for name, value in child_environment(hidden).items() if not _FOREIGN.fullmatch(name)}
        # Spark's launcher is a second JVM that lives for a second: it is done sooner if it compiles little.
        launcher = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
        return {
            **own,
            **({"JAVA_HOME": str(self.archive.java.home)} if self.archive else {}),
            "TMPDIR": str(scratch),
            "SPARK_LAUNCHER_OPTS": launcher,
        }


def require_spark(*, remote: bool = False) -> None:
    """Check that pyspark is here, without importing it, and its client for Spark Connect if that is needed.

    Raises:
        EnvironmentProblem: It is not installed, or in a version that the connector does not fit.
    """
    try:
        found = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        found = "not installed"
    if found != _SPARK_VERSION:
        raise EnvironmentProblem(
            f"Pipelines need pyspark {_SPARK_VERSION}; here it is {found}. Run: pip install 'headrace[pipelines]'"
        )
    require("pipelines", "a pipeline")
    if remote:
        require("connect", "driver.remote")


def check_heaps(specs: Sequence[PipelineSpec]) -> Sequence[PipelineSpec]:
    """Return pipelines whose heaps fit the memory of this machine or container; a tight fit is logged.

    Raises:
        PipelineInvalid: They do not fit.
    """
    memory = machine_bytes()
    each = [spec.driver.heap_bytes for spec in specs if not spec.driver.remote]
    heaps, overhead = sum(each), len(each) * _OVERHEAD_BYTES
    text = f"the Java heaps of {len(each)} pipelines are {heaps / _GIB:.1f} GiB, and this machine has "
    text += f"{memory / _GIB:.1f} GiB of memory: lower driver.heap_bytes, or run some of them elsewhere"
    if heaps > memory:
        raise PipelineInvalid(text)
    if heaps + overhead > memory:
        log.warning("%s; each driver takes about %g GiB more than its heap", text, _OVERHEAD_BYTES / _GIB)
    return specs


async def find_toolchain(progress: Progress | None = None) -> Toolchain:
    """Return Java and the jars; the first call of a user downloads ten megabytes.

    Raises:
        EnvironmentProblem: Java is missing or too old, or a jar cannot be downloaded.
    """
    java = await run_blocking(find_java, _JAVA_VERSION, for_spark=True)
    folder = await run_blocking(ensure_artifacts, "spark", progress)
    spark = find_spec("pyspark")
    assert spark
    assert spark.origin
    archive = ClassArchive(java, folder, Path(spark.origin).with_name("jars"))
    return Toolchain(tuple(sorted(folder.glob("*.jar"))), archive)


_TAIL_BYTES = 4_096
_TAIL_LINES = 5
_MOST_OUTPUT_BYTES, _KEPT_OUTPUT_BYTES = 16_777_216, 1_048_576


class DriverProcess:
    """A running driver process and its JVM."""

    def __init__(self, child: ChildProcess, errors: Path) -> None:
        self._child = child
        self._errors = errors
        self._decoder = msgspec.json.Decoder(AnyEvent)

    @classmethod
    async def start(
        cls, owner: Service, plan: DriverPlan, toolchain: Toolchain, security: ConnectorSecurity
    ) -> DriverProcess:
        """Start the process and send its first request; it dies with this process, and its JVM with it."""
        plan.scratch.mkdir(parents=True, exist_ok=True)
        write_secrets(plan.folder, security.secrets, shared=plan.spec.driver.on_cluster, keeps_others=True)
        errors = plan.folder / "driver.err"
        with errors.open("wb"), errors.open("ab") as file:  # still appends after `bound_output` has cut it
            child = await ChildProcess.start(
                owner,
                f"driver of {plan.spec.name}",
                [sys.executable, "-P", "-m", "headrace_pipelines.driver"],
                on_exit=lambda code: None,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                env=toolchain.environment(plan.folder, security.values),
                cwd=plan.folder,
                limit=MOST_RESPONSE_BYTES + 65_536,
            )
        driver = cls(child, errors)
        driver.request(plan)
        return driver

    def request(self, plan: DriverPlan) -> None:
        """Send a request; after the task `run` the process accepts no more."""
        assert self._child.process.stdin is not None
        self._child.process.stdin.write(plan.document() + b"\n")
        if plan.task.kind == "run":
            self._child.process.stdin.close()

    @property
    def pid(self) -> int:
        """Process id of the driver; its JVM is in the same process group."""
        return self._child.pid

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield the driver's events until the process has ended."""
        assert self._child.process.stdout is not None
        async for line in self._child.process.stdout:
            yield self._decoder.decode(line)

    async def exit_code(self) -> int:
        """Wait for the end of the process; negative is the signal that ended it."""
        return await self._child.process.wait()

    async def stop(self, deadline: Deadline) -> None:
        """Let each flow finish its micro-batch, at most until the deadline; after it nothing of the process is left."""
        # Only the Python process gets the signal. The JVM would end at once.
        with contextlib.suppress(ProcessLookupError):
            self._child.process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.exit_code(), deadline.remaining_seconds)
        self.kill()

    def kill(self) -> None:
        """End the process and its JVM now; they may have ended already."""
        self._child.kill()

    def bound_output(self) -> None:
        """Cut standard error to its newest part if it is long: handlers and consoles may print without end."""
        with contextlib.suppress(OSError), self._errors.open("ab") as file:
            if file.tell() > _MOST_OUTPUT_BYTES:
                newest = self._tail(_KEPT_OUTPUT_BYTES)
                file.truncate(0)
                file.write(newest)

    def _tail(self, size: int) -> bytes:
        with contextlib.suppress(OSError), self._errors.open("rb") as file:
            file.seek(max(0, self._errors.stat().st_size - size))
            return file.read()
        return b""  # a cleaner of logs has removed the file

    def last_output(self) -> str:
        """Return the last lines of what the process and its JVM wrote to standard error; empty if nothing."""
        lines = self._tail(_TAIL_BYTES).decode(errors="replace").splitlines()
        # Java warns at every start about a module that Spark asks for.
        return "\n".join([line for line in lines if not line.startswith("WARNING: ")][-_TAIL_LINES:])
