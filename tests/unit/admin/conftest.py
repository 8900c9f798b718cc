"""The running server of the tests of health and of dead letters over HTTP."""

from tests.running_server import opened, pytest_pyfunc_call, server  # noqa: F401
