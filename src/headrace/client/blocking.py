"""The synchronous client, on httpx."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from headrace.client.exchange import (
    ClientRecord,
    HttpReply,
    HttpRequest,
    ResponseLost,
    RetryPolicy,
    Work,
    error_of,
    load_httpx,
)
from headrace.client.operations import ClientOperations, EventReader, InstanceOperations
from headrace.errors import HeadraceError

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def blocking(operation: Callable[Concatenate[S, P], Work[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return an operation as a method that a client or consumer runs."""

    @functools.wraps(operation)
    def method(self: Any, /, *args: P.args, **named: P.kwargs) -> T:
        return self.run(operation(self.operations, *args, **named))  # type: ignore[no-any-return]

    return method


class HeadraceClient:
    """A client of a Headrace service. Use it as a context manager, or call `close`.

    It raises the service's errors as those of `headrace.errors`, with `code`, `status`, `description` and `parameters`.
    If a request gets no response after all attempts, it raises httpx's `TransportError`.
    """

    def __init__(
        self,
        url: str = "http://localhost:8082",
        *,
        token: str = "",
        retries: RetryPolicy = RetryPolicy(),  # noqa: B008 it is immutable
        **options: Any,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            url: URL of the service.
            token: Sent as `Authorization: Bearer`; empty for none.
            retries: How often to send a repeatable request again.
            options: Options of `httpx.Client`: `verify`, `cert`, `proxy`, `headers` ...
        """
        headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **options.pop("headers", {})}
        self.httpx = httpx = load_httpx()
        self.http = httpx.Client(base_url=url, headers=headers, **options)
        self.operations = ClientOperations(retries)

    produce = blocking(ClientOperations.produce)
    produce_all = blocking(ClientOperations.produce_all)
    transaction = blocking(ClientOperations.transaction)

    @functools.wraps(ClientOperations.instance)
    def consumer(self, *args: Any, **named: Any) -> GroupConsumer:
        return GroupConsumer(self, self.operations.instance(*args, **named))

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(self, work: Work[T]) -> T:
        """Run an operation."""
        httpx = self.httpx
        try:
            step = next(work)
            while True:
                if not isinstance(step, HttpRequest):
                    time.sleep(step)
                    step = next(work)
                    continue
                try:
                    response = self.http.request(**step.arguments)
                    reply = HttpReply(response.status_code, response.content, response.headers)
                except httpx.TransportError as cause:
                    unsent = isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
                    step = work.throw(ResponseLost(cause, sent=not unsent))
                else:
                    step = work.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result


class GroupConsumer:
    """A consumer of a group. Iterate over it, `stream` it or `read` it; one of them at a time.

    `commit` commits the records that were returned: in an iteration, all up to the current one. Records that are not
    committed are delivered again to a member of the group.
    """

    def __init__(self, client: HeadraceClient, operations: InstanceOperations) -> None:
        self.operations = operations
        self.run = client.run
        self._client = client

    open = blocking(InstanceOperations.open)
    close = blocking(InstanceOperations.close)
    read = blocking(InstanceOperations.read)
    commit = blocking(InstanceOperations.commit)
    committed = blocking(InstanceOperations.committed)
    assigned = blocking(InstanceOperations.assigned)
    seek = blocking(InstanceOperations.seek)
    seek_times = blocking(InstanceOperations.seek_times)
    seek_first = blocking(InstanceOperations.seek_first)
    seek_last = blocking(InstanceOperations.seek_last)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[ClientRecord]:
        """Yield records as they arrive, without an end."""
        while True:
            yield self.run(self.operations.handed())

    def stream(self) -> Iterator[ClientRecord]:
        """Yield records of a stream of server-sent events, without an end; reconnect when the connection is lost.

        Raises:
            HeadraceError: The service ended the stream, and another connection would not help.
        """
        reader = EventReader(self.operations)
        while True:
            problem: Exception | None = None
            self.run(self.operations.streams())
            try:
                with self._client.http.stream(**reader.request.arguments) as response:
                    if response.status_code != 200:
                        body = response.read()
                        raise error_of(HttpReply(response.status_code, body, response.headers))
                    for line in response.iter_lines():
                        if record := reader.feed(line):
                            yield record
                        if self.operations.has_moved:
                            break
            except (self._client.httpx.TransportError, HeadraceError) as ended:
                problem = ended
            self.run(reader.recover(problem))
