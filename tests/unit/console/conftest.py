"""The fixtures of a running server."""

from tests.running_server import opened  # noqa: F401
