"""Compare the model with a real cluster on this machine.

Run it by `python -m headrace_devkit.simulation.calibration [SCRIPT ...]`.
"""

import sys
import tempfile
from pathlib import Path

from headrace_devkit.devcluster import Cluster
from headrace_devkit.simulation.calibration.scripts import SCRIPTS
from headrace_devkit.simulation.calibration.traces import explained, on_the_broker


def main(names: list[str]) -> int:
    """Run scripts, by default all, and say which traces the model does not give; return 1 if there is one."""
    if unknown := {*names} - {*SCRIPTS}:
        sys.stderr.write(f"unknown script {', '.join(sorted(unknown))}: known are {', '.join(SCRIPTS)}\n")
        return 2
    failed = 0
    for brokers in (1, 3):
        chosen = [name for name in names or SCRIPTS if SCRIPTS[name].brokers == brokers]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(Path(folder), brokers)
            cluster.start()
            try:
                for name in chosen:
                    for protocol in SCRIPTS[name].protocols:
                        why = explained(name, protocol, on_the_broker(name, protocol, cluster))
                        failed += bool(why)
                        sys.stdout.write(f"{name}, {protocol}: {why or 'equal'}\n")
                        sys.stdout.flush()
            finally:
                cluster.stop()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
