"""From the client's errors to ours."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from pathlib import Path

import confluent_kafka
import pytest
import yaml
from confluent_kafka import KafkaError as ClientError

from headrace import errors
from headrace.kafka.client.error_map import ClientErrors, report_error, to_error
from headrace.runtime import OwnedThread

KINDS = yaml.safe_load(Path(__file__).with_name("error_map.yaml").read_text())


@pytest.mark.parametrize(("call", "name", "kind"), [(call, *row) for call in KINDS for row in KINDS[call].items()])
def test_the_class_says_what_to_do(call: str, name: str, kind: str) -> None:
    """What may be written is a timeout (unknown). A report says nothing of the attempts before the last one."""
    error = ClientError(getattr(ClientError, name))
    assert type(to_error(error, "produce to t") if call == "request" else report_error(error, "t")).__name__ == kind


def test_every_error_of_the_client_is_mapped() -> None:
    """Whatever the client reports becomes one of ours, with Kafka's own number and name."""
    numbers = {
        value for name in dir(ClientError) if name.isupper() and isinstance(value := getattr(ClientError, name), int)
    }
    for number in numbers:
        error = to_error(confluent_kafka.KafkaException(ClientError(number)), "ask")
        assert error.parameters["kafka_code"] == number
        assert error.parameters["kafka_name"] in error.description


def test_a_fatal_error_is_fatal_whatever_its_number() -> None:
    """The client says so itself."""
    assert isinstance(to_error(ClientError(ClientError.UNKNOWN, "x", True), "produce"), errors.FatalKafkaError)


def test_what_is_printed_is_for_people() -> None:
    """Kafka's own reason says all where there is no advice; no docstring that is shown tells of our parameters."""
    refused = to_error(ClientError(ClientError.INVALID_CONFIG, "Invalid value abc"), "create topic y")
    assert refused.description == "create topic y: Invalid value abc (INVALID_CONFIG)"
    away = to_error(ClientError(ClientError._TRANSPORT, "away"), "list topics")
    assert away.description == f"list topics: away (_TRANSPORT). {errors.KafkaUnavailable.__doc__}"
    assert [error.__name__ for error in errors.catalogue() if "parameters" in (error.__doc__ or "")] == []


def raise_as_the_client_does() -> None:
    """Raise an error that is no exception, as its code in C does."""
    error = ClientError(ClientError._FENCED, "fenced by the test", fatal=True)
    ctypes.pythonapi.PyErr_SetObject(ctypes.py_object(ClientError), ctypes.py_object(error))


needs_old_python = pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python makes it a SystemError since 3.12")


@needs_old_python
def test_an_error_of_the_client_is_raised_as_an_exception() -> None:
    """No `except` with a class would catch it."""
    with pytest.raises(confluent_kafka.KafkaException, match="fenced by the test") as raised, ClientErrors():
        raise_as_the_client_does()
    assert raised.value.args[0].code() == ClientError._FENCED


def test_an_error_of_a_report_gives_way_to_the_fatal_error() -> None:
    """The client meets the fatal error first, and then cannot call the report's callback."""
    fatal = confluent_kafka.KafkaException(ClientError(ClientError._FENCED, "fenced by the test", fatal=True))
    with pytest.raises(confluent_kafka.KafkaException, match="fenced by the test"), ClientErrors():
        raise SystemError("a callback returned a result with an exception set") from fatal


@needs_old_python
async def test_a_thread_that_ends_by_it_does_not_end_unseen() -> None:
    """Its owner learns of it, as of every exception."""
    died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    OwnedThread("t", lambda stop: raise_as_the_client_does(), died.set_result).start()
    assert "fenced by the test" in str(await asyncio.wait_for(died, 10))
