"""The asynchronous client, on httpx."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from headrace.client.exchange import ClientRecord, ClientRequest, HttpReply, ResponseLost, RetryPolicy, Work, load_httpx
from headrace.client.operations import ClientOperations, InstanceOperations

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def awaiting(operation: Callable[Concatenate[S, P], Work[T]]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """Return an operation as a method that a client or consumer runs."""

    @functools.wraps(operation)
    def method(self: Any, /, *args: P.args, **named: P.kwargs) -> Awaitable[T]:
        return self.run(operation(self.operations, *args, **named))  # type: ignore[no-any-return]

    return method


class AsyncHeadraceClient:
    """A client of a Headrace service. Use it as a context manager, or call `aclose`.

    It raises the service's errors as those of `headrace.errors`, with `code`, `status`, `description` and `parameters`.
    If a request gets no response after all attempts, it raises httpx's `TransportError`. It follows no redirect.
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
            options: Options of `httpx.AsyncClient`: `verify`, `cert`, `proxy`, `headers` ...
        """
        headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **options.pop("headers", {})}
        self.httpx = httpx = load_httpx()
        self.http = httpx.AsyncClient(base_url=url, headers=headers, **options)
        self.operations = ClientOperations(retries)

    produce = awaiting(ClientOperations.produce)
    produce_all = awaiting(ClientOperations.produce_all)
    transaction = awaiting(ClientOperations.transaction)

    @functools.wraps(ClientOperations.instance)
    def consumer(self, *args: Any, **named: Any) -> AsyncGroupConsumer:
        return AsyncGroupConsumer(self, self.operations.instance(*args, **named))

    async def aclose(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def run(self, work: Work[T]) -> T:
        httpx = self.httpx
        try:
            step = next(work)
            while True:
                if not isinstance(step, ClientRequest):
                    await asyncio.sleep(step)
                    step = next(work)
                    continue
                try:
                    response = await self.http.request(**step.arguments)
                    reply = HttpReply(response.status_code, response.content, response.headers, str(response.url))
                except httpx.RequestError as cause:
                    unsent = isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
                    step = work.throw(ResponseLost(cause, sent=not unsent))
                else:
                    step = work.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result


class AsyncGroupConsumer:
    """A consumer of a group. Iterate over it, or `read` it; one of them at a time.

    `commit` commits the records that were returned: in an iteration, all up to the current one. Records that are not
    committed are delivered again to a member of the group.
    """

    def __init__(self, client: AsyncHeadraceClient, operations: InstanceOperations) -> None:
        self.operations = operations
        self.run = client.run

    open = awaiting(InstanceOperations.open)
    close = awaiting(InstanceOperations.close)
    read = awaiting(InstanceOperations.read)
    commit = awaiting(InstanceOperations.commit)
    committed = awaiting(InstanceOperations.committed)
    assigned = awaiting(InstanceOperations.assigned)
    seek = awaiting(InstanceOperations.seek)
    seek_times = awaiting(InstanceOperations.seek_times)
    seek_first = awaiting(InstanceOperations.seek_first)
    seek_last = awaiting(InstanceOperations.seek_last)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[ClientRecord]:
        """Yield records as they arrive, without an end."""
        while True:
            yield await self.run(self.operations.handed())
