"""Requests that are written as one transaction each: `POST /transactions`, and those with an `Idempotency-Key`."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.http.auth.principals import WRITE
from headrace.http.endpoint import JSON, KAFKA, RECORDS_BODY, Endpoint, Errors, Rule, below, is_admin, owner_of, require
from headrace.http.forwarding import Forwarder
from headrace.http.messages import HttpResponse, read_json
from headrace.http.request import HttpRequest, RequestHead, WholeResponse
from headrace.http.request_checks import IDEMPOTENCY_KEY
from headrace.runtime import next_slice
from headrace.runtime.telemetry.metrics import Metrics
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.produce.idempotency import Idempotency
from headrace.sidecar.produce.key_owners import KeyOwners
from headrace.sidecar.produce.produce import LONG_BODY_BYTES
from headrace.sidecar.produce.produce_response import EncodedResponse, Result
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
    """Writes transactions in steps, once per `Idempotency-Key`, and makes the responses of all that writes."""

    def __init__(
        self, transactions: Transactions, idempotency: Idempotency, metrics: Metrics, keys: KeyOwners | None = None
    ) -> None:
        """Prepare; `keys` finds the process of a key where several divide them."""
        self.transactions = transactions
        self._keys = keys
        self.idempotency = idempotency
        self._metrics = metrics

    async def forward_key(self, request: HttpRequest, target: str, body: bytes) -> bool:
        """Have the process of the key serve a request; False if that is this one, or there is no key."""
        return self._keys is not None and await self._keys.forward(request, target, body)

    def accepts(self, head: RequestHead) -> bool:
        return False

    def needs(self, request: HttpRequest) -> None:
        return None

    def do(self, needed: PreparedTransaction | EncodedResponse, done: Callable[[Sequence[Result]], None]) -> None:
        if isinstance(needed, EncodedResponse):  # nothing is left to do
            asyncio.get_running_loop().call_soon(done, ())
        else:
            self.transactions.do(needed, done)

    def respond(self, needed: PreparedTransaction | EncodedResponse, results: Sequence[Result]) -> WholeResponse:
        if isinstance(needed, EncodedResponse):
            return HttpResponse(needed.body, needed.status, headers=[_REPLAYED])
        return self.counted(self.transactions.respond(needed, results))

    def counted(self, response: EncodedResponse) -> EncodedResponse:
        """Return a response, and count its records."""
        self._metrics.produced(response.requested_records, response.written_records)
        return response


@dataclasses.dataclass(eq=False)
class TransactionRoute:
    """Writes records to several topics in one transaction."""

    _writing: Writing
    _settings: HttpConfig
    _instances: ActiveInstances | None = None
    _forwarder: Forwarder | None = None

    def __post_init__(self) -> None:
        self.steps = {TransactionRoute.load.id: self._writing}

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
    async def load(self, request: HttpRequest) -> PreparedTransaction | EncodedResponse | None:
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

        async def load_here(request: HttpRequest) -> PreparedTransaction | EncodedResponse:
            key = request.head.headers.get(IDEMPOTENCY_KEY)
            if key is None:
                return await prepare()
            return await self._writing.idempotency.load(key, request.head.path, body, prepare)

        if consumer:
            require(request, (WRITE,), "group", consumer.group)
            if self._instances is None:
                raise errors.InvalidRequest("active consumers are disabled here (active_consumers.enabled)")
            if self._forwarder:  # only the process that has the instance knows what was delivered
                key = consumer.group, consumer.instance_id
                needed: PreparedTransaction | None = await self._forwarder.serve(load_here, request, key, body)
                return needed
        elif await self._writing.forward_key(request, request.head.path, body):
            return None
        return await load_here(request)
