"""The calibration scripts of producers, transactions and administration, by their names."""

from collections.abc import Callable

from headrace_devkit.simulation.calibration.client_stages import ClientStage

ClientScript = Callable[[ClientStage], None]
CLIENT_SCRIPTS: dict[str, ClientScript] = {}
DELAYING: set[str] = set()
"""Scripts that delay requests, so they need a proxy."""


def script(run: ClientScript) -> ClientScript:
    """Add a script."""
    CLIENT_SCRIPTS[run.__name__] = run
    return run
