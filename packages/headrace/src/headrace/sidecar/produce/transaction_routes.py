"""Requests that are written as one transaction each: `POST /transactions`, and those with an `Idempotency-Key`."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Final

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.http.auth.principals import WRITE
from headrace.http.endpoint import JSON, KAFKA, RECORDS_BODY, Endpoint, Errors, Rule, below, is_admin, owner_of, require
from headrace.http.forwarding import Forwarder
from headrace.http.messages import HttpResponse, read_json, retry_after
from headrace.http.request import Headers, HttpRequest
from headrace.http.request_checks import IDEMPOTENCY_KEY
from headrace.runtime import next_slice
from headrace.runtime.telemetry.metrics import Metrics
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.produce.idempotency import Idempotency
from headrace.sidecar.produce.key_owners import KeyOwners
from headrace.sidecar.produce.produce import LONG_BODY_BYTES
from headrace.sidecar.produce.produce_response import EncodedResponse
from headrace.sidecar.produce.record_ids import record_ids
from headrace.sidecar.produce.transactions import (
    PreparedTransaction,
    TransactionRequest,
    TransactionResponse,
    Transactions,
    parse_transaction,
)

_CORRELATION: Final = "Names the request. It is returned in the response, and written into records that have none."
KEYED_HEADERS: Final = {
    "X-Correlation-Id": _CORRELATION,
    "X-Traceability-Id": _CORRELATION,
    "traceparent": "W3C Trace Context. It is written into records that have none.",
    "Idempotency-Key": "Names the request for its caller and topic. A repeated request writes nothing and gets the "
    "same response, with `Idempotency-Replayed: true`.",
}
"""Request headers of the endpoints that write."""
WRITE_ERRORS: Final[Errors] = (
    errors.TopicInternal,
    *RECORDS_BODY,
    errors.EncodeError,
    errors.SchemaNotFound,
    errors.SchemaInvalid,
    *below(errors.SchemaConflict),
    errors.ProducerNotEnabled,
    errors.RegistryUnavailable,
    errors.EnvironmentProblem,
    *KAFKA,
    errors.IdempotencyKeyReused,
    errors.IdempotencyKeyBusy,
)
_REPLAYED: Final = (b"idempotency-replayed", b"true")


class Writing:
    """Writes transactions, once per `Idempotency-Key`, and makes the responses of all that writes."""

    def __init__(
        self, transactions: Transactions, idempotency: Idempotency, metrics: Metrics, keys: KeyOwners | None = None
    ) -> None:
        """Prepare; `keys` finds the process of a key where several divide them."""
        self.transactions = transactions
        self._keys = keys
        self._idempotency = idempotency
        self._metrics = metrics

    async def forward_key(self, request: HttpRequest, target: str, body: bytes) -> bool:
        """Have the process of the key serve a request; False if that is this one, or there is no key."""
        return self._keys is not None and await self._keys.forward(request, target, body)

    async def once(
        self, key: bytes | None, target: str, request: bytes, prepare: Callable[[], Awaitable[PreparedTransaction]]
    ) -> HttpResponse:
        """Write the transaction from `prepare` and return the response; for a repeated key, the earlier one.

        `request` is compared when the key is repeated.
        """
        if key is None:
            return self.response(await self.transactions.write(await prepare()))
        response, replayed = await self._idempotency.once(key, target, request, prepare)
        return self.response(response, [_REPLAYED] if replayed else ())

    def response(self, response: EncodedResponse, headers: Headers = ()) -> HttpResponse:
        """Return a response, and count its records."""
        self._metrics.produced(response.requested_records, response.written_records)
        if response.retry_after_seconds is not None:
            headers = [*retry_after(response.retry_after_seconds), *headers]
        return HttpResponse(response.body, response.status, headers=headers)


@dataclasses.dataclass(eq=False)
class TransactionRoute:
    """Writes records to several topics in one transaction."""

    _writing: Writing
    _settings: HttpConfig
    _instances: ActiveInstances | None = None
    _forwarder: Forwarder | None = None

    @Endpoint(
        "POST",
        "/transactions",
        "postTransaction",
        "Write records to several topics, all of them or none",
        Rule((WRITE,), "produce"),
        {200: TransactionResponse},
        request={JSON: TransactionRequest},
        example={"topics": [{"topic": "orders", "records": [{"key": "a", "value": {"count": 2}}]}]},
        headers=KEYED_HEADERS,
        errors=(*WRITE_ERRORS, errors.InstanceNotFound, errors.InstanceState, errors.CommitRefused),
        error_fields=TransactionResponse,
        whole=True,
    )
    async def write(self, request: HttpRequest) -> None:
        body = await read_json(request, self._settings)
        if len(body) > LONG_BODY_BYTES:
            await next_slice()
        requested = parse_transaction(body, self._settings.max_records)
        for part in requested.topics:
            require(request, (WRITE,), "produce", part.topic)
            self._writing.transactions.internal.check_writable(part.topic, admin=is_admin(request))
        ids = record_ids(request)
        transactions = self._writing.transactions
        consumer = requested.consumer

        async def prepare() -> PreparedTransaction:
            instance = None
            if consumer and self._instances:
                instance = self._instances.use(consumer.group, consumer.instance_id, owner_of(request))
            return await transactions.prepare(requested, ids, instance)

        async def write_here(request: HttpRequest) -> None:
            key = request.head.headers.get(IDEMPOTENCY_KEY)
            await request.response.send(await self._writing.once(key, request.head.path, body, prepare))

        if consumer:
            require(request, (WRITE,), "group", consumer.group)
            if self._instances is None:
                raise errors.InvalidRequest("active consumers are disabled here (active_consumers.enabled)")
            if self._forwarder:  # only the process that has the instance knows what was delivered
                key = consumer.group, consumer.instance_id
                await self._forwarder.serve(write_here, request, key, body)
                return
        elif await self._writing.forward_key(request, request.head.path, body):
            return
        await write_here(request)
