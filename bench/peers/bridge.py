"""The bridge of Strimzi: reads of one consumer over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.active import Reader
from bench.environment import Bench, ended, first_to_last
from bench.measured import Measured
from headrace_devkit.devcluster.ports import free_ports
from headrace_jvm import find_java

READY_SECONDS, WARM_READS = 60.0, 3
SETTINGS = """\
bridge.id=bench
kafka.bootstrap.servers={servers}
kafka.consumer.max.poll.records={batch}
http.host=127.0.0.1
http.port={port}
http.management.port={other}
"""
BATCH = 1000
"""Records of a read at most: about as many of 1 KB as Headrace's reads of 1 MiB have."""
LOG = """\
appender.console.type = Console
appender.console.name = STDOUT
rootLogger.level = WARN
rootLogger.appenderRef.console.ref = STDOUT
"""
MEDIA = "application/vnd.kafka{}.v2+json"


class Bridge:
    """The running program; it stays warm between the rounds."""

    def __init__(self, port: int, process: int) -> None:
        self.url, self.process = f"http://127.0.0.1:{port}", process

    def read(self, bench: Bench, mode: str, topic: str, records: int) -> Measured:
        """Read a topic through one consumer, from the first record to the last."""
        group = f"bench-{time.time_ns()}"
        self.ask(f"/consumers/{group}", {"name": "one", "format": mode, "auto.offset.reset": "earliest"})
        self.ask(f"/consumers/{group}/instances/one/subscription", {"topics": [topic]})
        path = f"/consumers/{group}/instances/one/records?timeout=30000"
        reader = Reader(self.url, mode, records, path=path, accept=MEDIA.format(f".{mode}"))
        with ended(reader.process):
            return first_to_last(reader.line, self.process)

    def ask(self, path: str, body: object) -> None:
        headers = {"Content-Type": MEDIA.format("")}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=60).close()


@contextlib.contextmanager
def serving(bench: Bench, folder: Path) -> Iterator[Bridge]:
    """Run the program."""
    port, other = free_ports(2)
    own = bench.folder / "bridge"
    own.mkdir()
    settings, log = own / "settings", own / "log4j2.properties"
    settings.write_text(SETTINGS.format(servers=bench.cluster.bootstrap_servers, batch=BATCH, port=port, other=other))
    log.write_text(LOG)
    java = [str(find_java(21).executable), f"-Dlog4j2.configurationFile={log}", f"-Dvertx.cacheDirBase={own}"]
    words = ["-cp", f"{folder}/libs/*", "io.strimzi.kafka.bridge.Application", f"--config-file={settings}"]
    with (own / "log").open("w") as output:
        process = subprocess.Popen([*java, *words], stdout=output, stderr=output, env=dict(os.environ))
    try:
        wait_ready(port, process, own / "log")
        yield Bridge(port, process.pid)
    finally:
        process.kill()
        process.wait()


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"the bridge is not ready: {log.read_text()[-2000:]}")
