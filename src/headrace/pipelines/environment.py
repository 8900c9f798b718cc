"""What a driver process needs of this machine: pyspark, Java, the connector's jars, and an environment of its own."""

import os
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from headrace.errors import EnvironmentProblem
from headrace.jvm import ensure_artifacts, find_java
from headrace.lifecycle import run_blocking

_SPARK_VERSION = "4.2.0"
_JAVA_VERSION = 17
# Set by people for other Sparks of theirs; each would lead this one astray.
_FOREIGN = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT", "PYSPARK_DRIVER_PYTHON")


class Toolchain(NamedTuple):
    """What was found."""

    java_home: Path
    jars: tuple[Path, ...]

    def environment(self, scratch: Path) -> dict[str, str]:
        """Return the environment of a driver process whose temporary files go to `scratch`."""
        own = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        # The launcher is a JVM of its own that lives for a second: compile little, so that it starts sooner.
        launcher = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
        return {**own, "JAVA_HOME": str(self.java_home), "TMPDIR": str(scratch), "SPARK_LAUNCHER_OPTS": launcher}


def require_spark() -> None:
    """Check that pyspark is here, without importing it.

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


async def find_toolchain() -> Toolchain:
    """Return Java and the jars; the first call of a user downloads ten megabytes.

    Raises:
        EnvironmentProblem: Java is missing or too old, or a jar cannot be had.
    """
    java = await run_blocking(find_java, _JAVA_VERSION, for_spark=True)
    folder = await run_blocking(ensure_artifacts, "spark")
    return Toolchain(java.home, tuple(sorted(folder.glob("*.jar"))))
