"""Errors of Spark, Kafka and Python code as the driver reports them."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException

from headrace.errors import PipelineInvalid, RecordTooLarge
from headrace_pipelines.driver.failures import failure_event
from headrace_pipelines.driver.session import JvmEnded
from headrace_pipelines.driver_protocol import KAFKA_REFUSES
from yaml_table import table

FAILED = "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: "
LASTING: list[Any] = [
    (AnalysisException("x"), "AnalysisException", "x"),
    (PipelineInvalid("x"), PipelineInvalid.message, "x"),
    (RecordTooLarge("x"), RecordTooLarge.message, "x"),
    *table(__file__, "permanent_errors_are_not_retried"),
]


@pytest.mark.parametrize(("cause", "error", "words"), LASTING)
def test_permanent_errors_are_not_retried(cause: Exception | str, error: str, words: str) -> None:
    """The event has a name, the reason and what to do; no value of a record is in it."""
    event = failure_event(PySparkException(FAILED + cause) if isinstance(cause, str) else cause, "flows.f")
    assert (event.error, event.part, event.retriable) == (error, "flows.f", False)
    assert words in event.text
    assert "STREAM_FAILED" not in event.text
    assert "'x'" not in event.text


@pytest.mark.parametrize(("text", "error", "shown"), table(__file__, "all_other_errors_are_retried"))
def test_all_other_errors_are_retried(text: str, error: str, shown: str) -> None:
    """It may go away. The first lines are shown, without values of records."""
    event = failure_event(RuntimeError(text), "flows.f")
    assert (event.error, event.text, event.retriable) == (error, shown, True)


def test_a_full_heap_is_reported_with_the_setting() -> None:
    """Java's exit code for it becomes advice; any other is reported as it is."""
    assert "give it more with driver.heap_bytes" in str(JvmEnded(3))
    assert str(JvmEnded(-9)) == "the JVM ended with exit code -9"


@pytest.mark.parametrize(("text", "reason"), table(__file__, "a_lost_connect_server_is_named_and_waited"))
def test_a_lost_connect_server_is_named_and_waited_for(text: str, reason: str) -> None:
    """Whatever the request was when it was lost."""
    event = failure_event(PySparkException(text), "sources.a")
    assert (event.error, event.text) == ("SERVER_LOST", f"the Spark Connect server was lost: {reason}")
    assert (event.retriable, event.part) == (True, "")


class _Captured(PySparkException):
    """An error of the JVM as PySpark makes it: with a trace of its causes, or with the cause as another error."""

    def __init__(self, text: str, trace: str, cause: PySparkException | None = None) -> None:
        super().__init__(text)
        self._stackTrace = trace
        self._cause = cause


class _OfServer(PySparkException):
    """An error of Spark's client for Connect."""

    _stacktrace = "Caused by: org.apache.kafka.common.errors.GroupAuthorizationException: access group: g"


def test_a_rejection_by_kafka_is_recognised_by_its_cause() -> None:
    """Spark names the flow only; what Kafka's client reports is below it, and it is retried.

    Errors of a call to a Connect server have it as an attribute, the error of a query in its text.
    """
    trace = """java.util.concurrent.ExecutionException: org.apache.kafka.common.errors.SslAuthenticationException: SSL
\tat java.base/java.util.concurrent.CompletableFuture.reportGet(CompletableFuture.java:396)
Caused by: org.apache.kafka.common.errors.SslAuthenticationException: SSL handshake failed
Caused by: javax.net.ssl.SSLHandshakeException: PKIX path building failed
\t... 5 more"""
    cause = _Captured("Query terminated", "stack without causes", _Captured("SSL handshake failed", trace))
    failure = failure_event(cause, "flows.f")
    assert (failure.error, failure.retriable) == (KAFKA_REFUSES, True)
    assert failure.text.endswith("SSL handshake failed; SSLHandshakeException: PKIX path building failed")
    assert "reportGet" not in failure.text
    other = _Captured("Query terminated", "org.apache.kafka.common.errors.TimeoutException: Timed out")
    assert failure_event(other, "flows.f").error != KAFKA_REFUSES
    remote = PySparkException(f"failed\n\nJVM stacktrace:\n{_OfServer._stacktrace}")
    for each in (_OfServer("failed"), remote):
        assert failure_event(each, "flows.f").error == KAFKA_REFUSES
