"""Install the peers, once: `python -m bench.peers.install`. They go into `build/peers`, or where BENCH_PEERS says.

Dapr: the Go module proxy, with Kafka as its only component, because all of them take long to compile.
FastStream: PyPI, in an environment of its own.
Strimzi's bridge: its source, built with Maven and a JDK (JAVA_HOME) of at least 21, without two libraries that it
loads only for OAuth and for metrics.
kcat: what the system's packages have.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

HOME = Path(os.environ.get("BENCH_PEERS") or Path(__file__).parents[2] / "build" / "peers")
LIMIT_SECONDS = 1800.0
DAPR, FASTSTREAM, BRIDGE = "1.18.0", "0.7.8", "1.1.0"
DAPR_MAIN = """\
package main

import (
	"github.com/dapr/components-contrib/pubsub/kafka"
	"github.com/dapr/dapr/cmd/daprd/app"
	"github.com/dapr/dapr/pkg/components/pubsub"
)

func main() {
	pubsub.DefaultRegistry.RegisterComponent(kafka.NewKafka, "kafka")
	app.Run()
}
"""
BRIDGE_SOURCE = "https://github.com/strimzi/strimzi-kafka-bridge"
LEFT_OUT = ("kafka-oauth-client", "client-metrics-reporter", "strimzi-test-container")
"""Dependencies of the bridge that no class of it imports."""
CHECKS = ("checkstyle", "spotbugs", "maven.javadoc")


class NotInstalledError(Exception):
    """A peer cannot be had here; the text says why."""


class Peer(NamedTuple):
    """Another product."""

    name: str
    version: str
    program: Path
    install: Callable[[Path], None]
    """Takes the folder that becomes the peer's own."""

    @property
    def folder(self) -> Path:
        return HOME / f"{self.install.__name__}-{self.version}"

    @property
    def path(self) -> Path:
        return self.folder / self.program


def dapr(folder: Path) -> None:
    (folder / "main.go").write_text(DAPR_MAIN)
    run(folder, "go", "mod", "init", "daprd")
    run(folder, "go", "get", f"github.com/dapr/dapr@v{DAPR}")
    source = folder / "dapr"
    module = run(folder, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/dapr/dapr").strip()
    shutil.copytree(module, source, copy_function=shutil.copyfile)
    # Ends a program that was built with neither all components nor all stable ones.
    components = source / "cmd" / "daprd" / "components"
    (components / "zz_notag.go").write_text("package components\n")
    run(folder, "go", "mod", "edit", "-replace", "github.com/dapr/dapr=./dapr")
    run(folder, "go", "mod", "tidy")
    run(folder, "go", "build", "-o", "daprd", ".")


def faststream(folder: Path) -> None:
    run(folder, sys.executable, "-m", "venv", ".")
    python = str(folder / "bin" / "python")
    run(folder, python, "-m", "pip", "install", "--quiet", f"faststream[confluent]=={FASTSTREAM}", "uvloop")


def bridge(folder: Path) -> None:
    run(folder, "git", "clone", "--quiet", "--branch", BRIDGE, BRIDGE_SOURCE, ".")
    build = folder / "pom.xml"
    text = build.read_text()
    for name in LEFT_OUT:
        dependency = rf"<dependency>\s*<groupId>io.strimzi</groupId>\s*<artifactId>{name}<.*?</dependency>"
        text = re.sub(dependency, "", text, flags=re.DOTALL)
    build.write_text(text)
    run(folder, "mvn", "-B", "-q", "package", "-Dmaven.test.skip", *(f"-D{name}.skip" for name in CHECKS))


def kcat(folder: Path) -> None:
    found = shutil.which("kcat")
    if not found:
        raise NotInstalledError("kcat is missing: install it, such as with `apt-get install kcat`")
    (folder / "kcat").symlink_to(found)


PEERS = {
    "Dapr": Peer("Dapr", DAPR, Path("daprd"), dapr),
    "FastStream": Peer("FastStream", FASTSTREAM, Path("bin/python"), faststream),
    "Strimzi bridge": Peer(
        "Strimzi bridge", BRIDGE, Path(f"target/kafka-bridge-{BRIDGE}/kafka-bridge-{BRIDGE}"), bridge
    ),
    "kcat": Peer("kcat", "system", Path("kcat"), kcat),
}


def run(folder: Path, *command: str) -> str:
    """Run a command and return what it prints.

    Raises:
        NotInstalledError: It is missing, failed or took too long.
    """
    words = command[:3]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except FileNotFoundError as cause:
        raise NotInstalledError(f"{command[0]} is not installed") from cause
    except subprocess.TimeoutExpired as cause:
        raise NotInstalledError(f"`{' '.join(words)}` took longer than {LIMIT_SECONDS:g} s") from cause
    if done.returncode:
        raise NotInstalledError(f"`{' '.join(words)}` failed: {reason((done.stderr + done.stdout).splitlines())}")
    return done.stdout


def reason(lines: Sequence[str]) -> str:
    """Return the first line that says what went wrong, without addresses."""
    plain = [text for line in lines if (text := re.sub(r"\x1b\[[0-9;]*m", "", line).strip())]
    found = [line for line in plain if re.search("error|not found|403", line, re.I)] or [*plain, "no reason"]
    return re.sub(r"https?://\S+", "the registry", " ".join(found[0].split()))[:240]


def main() -> None:
    missing = []
    for peer in PEERS.values():
        if peer.path.exists():
            print(f"{peer.name} {peer.version} is installed", flush=True)
            continue
        print(f"{peer.name} {peer.version} is being installed into {peer.folder}", flush=True)
        shutil.rmtree(peer.folder, ignore_errors=True)
        peer.folder.mkdir(parents=True)
        start = time.monotonic()
        try:
            peer.install(peer.folder)
            print(f"{peer.name} took {time.monotonic() - start:.0f} s", flush=True)
        except NotInstalledError as cause:
            missing.append(f"{peer.name} {peer.version}: {cause}")
    if missing:
        raise SystemExit("\n".join(missing))


if __name__ == "__main__":
    main()
