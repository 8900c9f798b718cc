"""One Spark session in one process: settings, the JVM's flags, the lock on the pipeline's folder, and its end.

The JVM stays in this process's group, so that killing the group leaves nothing; it ends by itself when its standard
input closes, which the kernel does when this process dies. It also inherits the lock, so a driver that is started
while an old JVM still ends waits for it: two JVMs never write to one checkpoint.
"""

import contextlib
import functools
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from headrace_pipelines.checkpoints import locked
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.secrets_file import SECRETS_FILE
from headrace_pipelines.sources import texts
from headrace_pipelines.spark_project import SparkProject

_JVM_GONE_SECONDS = 0.5
_JVM_END_SECONDS = 120.0  # most of it is for a class-data archive that it writes
_RETRIES = 6  # of a call of a Spark Connect server that does not answer: about half a minute
_LONGEST_BACKOFF_MS = 10_000
_HEAP_FULL = 3  # exit code of a JVM that ends because of -XX:+ExitOnOutOfMemoryError
_TASK_FAILURES = 4  # without this limit, tasks in the driver's process are not retried
_SETTINGS = Path(__file__).with_name("spark.properties")
_LOOPBACK = "127.0.0.1"
_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_PROVIDERS = "org.apache.kafka.automatic.config.providers=org.apache.kafka.common.config.provider.FileConfigProvider"
_LISTS = {"extraJavaOptions": " ", "extraClassPath": os.pathsep, "spark.jars": ",", "spark.files": ","}
"""Ends of the names of settings that are appended to those of Headrace, with their separators."""
_LOGGING = Path(__file__).with_name("log4j2.properties")


class JvmEnded(Exception):
    """The JVM ended by itself."""

    def __init__(self, code: int) -> None:
        hint = ": its heap was full, give it more with driver.heap_bytes" if code == _HEAP_FULL else ""
        super().__init__(f"the JVM ended with exit code {code}{hint}")


@contextlib.contextmanager
def spark_session(plan: DriverPlan, on_wait: Callable[[str], None]) -> Iterator[SparkSession]:
    """Give a running session, and end its JVM afterwards.

    Waits while another process uses the pipeline's folder; before that, `on_wait` is called with its name.
    """
    # Otherwise Spark's Python workers run whatever `python3` is on the PATH.
    os.environ["PYSPARK_PYTHON"] = str(plan.spec.driver.settings.get("spark.pyspark.python", sys.executable))
    os.environ["SPARK_LOCAL_DIRS"] = str(plan.scratch)
    if not plan.spec.driver.on_cluster:
        os.environ["SPARK_LOCAL_IP"] = _LOOPBACK
    with locked(plan.folder, on_wait) as lock:
        shutil.rmtree(plan.scratch, ignore_errors=True)
        plan.scratch.mkdir(parents=True)
        try:
            with _remote(plan) if plan.spec.driver.remote else _local(plan, lock) as spark:
                yield spark
        finally:
            shutil.rmtree(plan.scratch, ignore_errors=True)


@contextlib.contextmanager
def _local(plan: DriverPlan, lock: IO[str]) -> Iterator[SparkSession]:
    """Give the session of a JVM of this process."""
    if isinstance(plan.spec, SparkProject):
        os.environ[_TOKEN] = os.urandom(32).hex()  # not a setting, which process lists would show
    conf = SparkConf(loadDefaults=False).setAll(list(settings(plan).items()))
    gateway: Any = launch_gateway(conf, {"pass_fds": (lock.fileno(),)})  # type: ignore[no-untyped-call]
    if token_url := plan.security.get("kafka.sasl.oauthbearer.token.endpoint.url"):
        # Java's Kafka client asks no other server for tokens. A flag of the JVM would be in the process list.
        gateway.jvm.System.setProperty("org.apache.kafka.sasl.oauthbearer.allowed.urls", token_url)
    context = SparkContext(conf=conf, gateway=gateway)
    try:
        send_code(context.addPyFile, plan)
        yield SparkSession(context)
    except Exception as cause:  # boundary: the status shows the JVM's end, not what followed from it
        raise _ended_jvm(gateway.proc) or cause from cause
    finally:
        _end(context, gateway)


@contextlib.contextmanager
def _remote(plan: DriverPlan) -> Iterator[SparkSession]:
    """Give a session of a Spark Connect server; the server ends its queries with it."""
    from pyspark.sql.connect.client.retries import DefaultPolicy  # here, because it needs the extra `connect`

    spark = SparkSession.builder.remote(str(plan.spec.driver.remote)).create()
    spark.client.set_retry_policies([DefaultPolicy(_RETRIES, max_backoff=_LONGEST_BACKOFF_MS)])
    try:
        for name, value in settings(plan).items():
            if name.startswith("spark.sql.") and name != "spark.sql.warehouse.dir":
                spark.conf.set(name, value)
        send_code(functools.partial(spark.addArtifacts, pyfile=True), plan)
        yield spark
    finally:
        spark.client.set_retry_policies([])
        with contextlib.suppress(Exception):  # boundary: a server that is lost has no session
            spark.stop()


def _ended_jvm(process: Any) -> JvmEnded | None:
    """Return what to raise if the JVM has ended: the errors of a lost connection do not name the cause."""
    with contextlib.suppress(Exception):  # boundary: a JVM that still runs is not the cause
        return JvmEnded(process.wait(_JVM_GONE_SECONDS))
    return None


def _end(context: SparkContext, gateway: Any) -> None:
    with contextlib.suppress(Exception):  # boundary: a JVM that has ended cannot stop
        context.stop()
        gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(_JVM_END_SECONDS)


def settings(plan: DriverPlan) -> dict[str, str]:
    """Return Spark's settings for a plan, as texts by name."""
    driver = plan.spec.driver
    threads = str(driver.cores or "*")
    if "task" in plan.spec.transactions:
        threads += f",{_TASK_FAILURES}"
    lines = [line for line in _SETTINGS.read_text().splitlines() if line and not line.startswith("#")]
    found = {
        **dict(line.split("=", 1) for line in lines),
        "spark.app.name": f"headrace.{plan.spec.name}",
        "spark.master": driver.master or f"local[{threads}]",
        "spark.driver.memory": f"{driver.heap_bytes // 1024}k",
        "spark.driver.extraClassPath": os.pathsep.join(map(str, plan.jars)),
        "spark.driver.extraJavaOptions": _java_options(plan),
        "spark.sql.warehouse.dir": str(plan.scratch / "warehouse"),
        "spark.sql.shuffle.partitions": str(driver.shuffle_partitions),
        # Between two tasks a file of the pipeline may change, and workers keep the modules that they have imported.
        "spark.python.worker.reuse": str(plan.task.kind == "run").lower(),
    }
    if driver.on_cluster:
        found = {name: value for name, value in found.items() if value != _LOOPBACK}
        found["spark.jars"] = ",".join(map(str, plan.jars))
        found["spark.executor.extraJavaOptions"] = f"-D{_PROVIDERS}"
        if any(SECRETS_FILE in value for value in plan.security.values()):
            found["spark.files"] = str(plan.folder / SECRETS_FILE)  # executors have it in their working folder
        if driver.cores:
            found["spark.cores.max"] = str(driver.cores)
    for name, value in texts(driver.settings).items():
        separator = next((each for end, each in _LISTS.items() if name.endswith(end)), None)
        found[name] = f"{found[name]}{separator}{value}" if separator and name in found else value
    if isinstance(plan.spec, SparkProject):
        if not plan.spec.storage.startswith("file:") and _MANAGER not in plan.spec.configuration:
            del found[_MANAGER]  # that of Headrace is for a local disk
        found |= _of_project(plan, plan.spec, found)
    return found


def _of_project(plan: DriverPlan, project: SparkProject, found: Mapping[str, str]) -> dict[str, str]:
    """Return what a project needs: a server for its definitions, and a catalog that outlasts the JVM.

    With a catalog in memory, the next JVM would not know the tables whose checkpoints it continues.
    """
    given = project.configuration
    more = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": _LOOPBACK,
        "spark.connect.grpc.binding.port": "0",
    }
    if plan.task.kind == "run":
        more["spark.sql.warehouse.dir"] = given.get("spark.sql.warehouse.dir", str(plan.folder / "warehouse"))
        if "spark.sql.catalogImplementation" not in given:
            database = f"jdbc:derby:;databaseName={plan.folder / 'catalog'};create=true"
            more |= {"spark.sql.catalogImplementation": "hive", "spark.hadoop.javax.jdo.option.ConnectionURL": database}
    if project.uses_delta:
        delta = {
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        }
        more |= {name: value for name, value in delta.items() if name not in found}
    return more


def send_code(send: Callable[[str], None], plan: DriverPlan) -> None:
    """Give the Python workers the modules in the pipeline's folder, and what the file names."""
    found = plan.spec.folder.glob("*.py") if plan.spec.folder and plan.task.kind == "run" else ()
    modules = sorted(each for each in found if each.is_file())
    if modules:
        with zipfile.ZipFile(plan.scratch / "pipeline.zip", "w", strict_timestamps=False) as archive:
            for module in modules:
                archive.write(module, module.name)
        send(str(plan.scratch / "pipeline.zip"))
    for name in plan.spec.driver.python_files:
        send(plan.path(name))


def _java_options(plan: DriverPlan) -> str:
    options = {
        "headrace.log": plan.folder / "spark.log",
        "log4j2.configurationFile": _LOGGING.as_uri(),
        "java.io.tmpdir": plan.scratch,
        **dict([_PROVIDERS.split("=")]),
    }
    # A full heap ends the JVM, and the run restarts from its checkpoint instead of crawling. The serial collector takes
    # the least memory of all, and on two cores no more time than others.
    # A core file would hold secrets.
    flags = "-XX:+UseSerialGC -XX:+ExitOnOutOfMemoryError -XX:-UsePerfData -XX:-CreateCoredumpOnCrash"
    flags += " -Xlog:cds=off -Xlog:cds+dynamic=off"
    further = [*(f"-D{name}={value}" for name, value in options.items()), *plan.java_flags]
    return " ".join([flags, *(f'"{flag}"' for flag in further)])
