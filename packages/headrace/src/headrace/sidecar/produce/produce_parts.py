"""Producing in one process: what writes records, transactions and idempotency keys, and its endpoints."""

from collections.abc import Sequence
from typing import Any

from headrace.consumers.consumers_parts import ConsumersParts
from headrace.kafka import TransactionalProducers
from headrace.process_context import ProcessContext, transactional_id
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace.sidecar.active.active_parts import ActiveParts
from headrace.sidecar.produce.idempotency import Idempotency
from headrace.sidecar.produce.key_owners import KeyOwners
from headrace.sidecar.produce.produce import ProduceService
from headrace.sidecar.produce.routes import ProduceRoute
from headrace.sidecar.produce.transaction_routes import TransactionRoute, Writing
from headrace.sidecar.produce.transactions import Transactions


class ProduceParts(Parts):
    """The endpoints of producing, and the services behind them."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        config, process = context.config, context.process
        self.service = produce = ProduceService(
            config.producer,
            context.codecs,
            context.producer,
            context.topics,
            context.audit,
            config.http.max_records,
            needed.of(ConsumersParts).internal,
        )
        producers = TransactionalProducers(config.kafka, config.producer, transactional_id(config), admin=context.admin)
        transactions = Transactions(config.producer, produce, producers, context.audit)
        idempotency = Idempotency(config.producer.idempotency, context.admin, producers.open, context.clock)
        self._services = [producers, idempotency]
        keys: KeyOwners | None = None
        if process.share and process.forwarder:
            keys = KeyOwners(process.forwarder, process.share.urls, process.share.url)
            idempotency.is_own = keys.is_own
        writing = Writing(transactions, idempotency, context.metrics, keys)
        instances = needed.of(ActiveParts).instances
        route = ProduceRoute(produce, writing, context.metrics, config.http)
        self._stream = route.stream
        self.endpoints = [route, TransactionRoute(writing, config.http, instances, process.forwarder)]

    def services(self) -> Sequence[Service]:
        return self._services

    def on_listener(self, web: Any) -> None:
        self._stream.spawn = web.spawn
        web.before_drain.append(self._stream.drain)
