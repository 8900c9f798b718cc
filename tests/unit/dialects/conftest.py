"""The running server of the tests of endpoints over HTTP."""

from tests.running_server import opened, pytest_pyfunc_call, server  # noqa: F401
