"""All calibration scripts of producers, transactions and administration."""

from headrace_devkit.simulation.calibration import (
    administration_scripts,
    limit_scripts,
    producer_scripts,
    transaction_scripts,
)
from headrace_devkit.simulation.calibration.client_registry import CLIENT_SCRIPTS, DELAYING

__all__ = [
    "CLIENT_SCRIPTS",
    "DELAYING",
    "administration_scripts",
    "limit_scripts",
    "producer_scripts",
    "transaction_scripts",
]
