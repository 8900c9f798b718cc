"""Where peers come from: package registries, into `build/peers`, once. Who cannot be had is left out with the reason.

Dapr: the Go module proxy, with Kafka as its only component, because all of them take long to compile.
FastStream: PyPI, in an environment of its own.
Strimzi's bridge: Maven Central. Nuclio's processor: the Go module proxy.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HOME = Path(__file__).parents[2] / "build" / "peers"
LIMIT_SECONDS = 900.0
DAPR, FASTSTREAM, BRIDGE, NUCLIO = "v1.14.0", "0.7.8", "0.30.0", "1.13.0"
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


class NotInstalledError(Exception):
    """A peer cannot be had here; the text says why."""


def dapr() -> Path:
    """Return the program `daprd`."""
    folder = HOME / "dapr"
    program = folder / "daprd"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "main.go").write_text(DAPR_MAIN)
    if not (folder / "go.mod").exists():
        run(folder, "go", "mod", "init", "daprd")
    run(folder, "go", "get", f"github.com/dapr/dapr@{DAPR}")
    source = folder / "dapr"
    if not source.exists():  # else the module is this folder, from a build that did not end
        module = run(folder, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/dapr/dapr").strip()
        shutil.copytree(module, source, copy_function=shutil.copyfile)
    # Ends a program that was built with neither all components nor all stable ones.
    components = source / "cmd" / "daprd" / "components"
    (components / "zz_notag.go").write_text("package components\n")
    run(folder, "go", "mod", "edit", "-replace", "github.com/dapr/dapr=./dapr")
    run(folder, "go", "mod", "tidy")
    run(folder, "go", "build", "-o", "daprd", ".")
    return program


def faststream() -> Path:
    """Return the Python that has FastStream with the client that Headrace uses."""
    folder = HOME / "faststream"
    python = folder / "bin" / "python"
    if not python.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        run(HOME, sys.executable, "-m", "venv", str(folder))
    run(HOME, str(python), "-m", "pip", "install", "--quiet", f"faststream[confluent]=={FASTSTREAM}", "uvloop")
    return python


def bridge() -> Path:
    """Fetch the bridge of Strimzi."""
    HOME.mkdir(parents=True, exist_ok=True)
    run(HOME, "mvn", "-B", "dependency:get", f"-Dartifact=io.strimzi:kafka-bridge:{BRIDGE}")
    raise NotInstalledError("its artifact is there now, but nothing here measures it yet")


def nuclio() -> Path:
    """Fetch the processor of Nuclio."""
    HOME.mkdir(parents=True, exist_ok=True)
    run(HOME, "go", "install", f"github.com/nuclio/nuclio/cmd/processor@{NUCLIO}")
    raise NotInstalledError("its processor is there now, but nothing here measures it yet")


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
