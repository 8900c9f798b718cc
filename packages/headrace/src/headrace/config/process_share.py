"""Several processes behind one port: how many, and what each of them gets of what the file allows them together."""

import os
import socket
import sys
from typing import Any, Final, NamedTuple

from pydantic import SecretStr

from headrace.config.active import ActiveConsumersConfig
from headrace.config.consumers import FlowControl, ReactiveConsumerConfig
from headrace.config.http import HttpConfig, SecurityConfig
from headrace.config.model import HeadraceConfig
from headrace.config.peer_processes import ClusterConfig
from headrace.config.producer_config import ProducerConfig

_MOST_OF_AUTO: Final = 4
_LEAST_READ_BYTES: Final = 1_048_576
_STATIC_MEMBER: Final = "group.instance.id"


class ProcessShare(NamedTuple):
    """One of several processes of a run."""

    number: int
    """From 0."""
    urls: tuple[str, ...]
    """Addresses of all of them on this machine, by number, where only they reach each other."""
    secret: str
    """Signs the requests between them; made for this run."""
    port: int
    """Port of clients, which all of them listen on."""
    management_port: int
    """That of `http.management`, if there is one."""
    watchdog_seconds: float
    """A process that does not say for this long that it is alive hangs; 0 for never."""

    @property
    def url(self) -> str:
        """Address of this process on this machine."""
        return self.urls[self.number]

    def of(self, config: HeadraceConfig) -> HeadraceConfig:
        """Return the configuration of this process: its part of each budget, and names of its own."""
        http, cluster = config.http, ClusterConfig(peers=[*self.urls], url=self.url, secret=SecretStr(self.secret))
        management = http.management and http.management.model_copy(update={"port": self.management_port})
        changes: dict[str, Any] = {
            "cluster": cluster,
            "http": self._http(http).model_copy(update={"port": self.port, "management": management}),
            "producer": self._producer(config.producer),
            "active_consumers": self._active(config.active_consumers),
            "security": self._security(config.security),
            "reactive_consumers": {name: self._reactive(one) for name, one in config.reactive_consumers.items()},
        }
        if self.number:
            changes |= dict.fromkeys(config.keys_of("first_process"))
        return config.model_copy(update=changes)

    def _part(self, whole: int, least: int = 1) -> int:
        return max(least, whole // len(self.urls))

    def _http(self, http: HttpConfig) -> HttpConfig:
        return http.model_copy(update={"max_connections": self._part(http.max_connections)})

    def _producer(self, producer: ProducerConfig) -> ProducerConfig:
        name = producer.transactions.id or f"headrace-{socket.gethostname()}-{self.port}"
        transactions = producer.transactions.model_copy(update={"id": f"{name}-{self.number}"})
        pending = self._part(producer.max_pending_bytes)
        return producer.model_copy(update={"transactions": transactions, "max_pending_bytes": pending})

    def _active(self, active: ActiveConsumersConfig) -> ActiveConsumersConfig:
        total = self._part(active.total_bytes, _LEAST_READ_BYTES)
        return active.model_copy(update={"max_instances": self._part(active.max_instances), "total_bytes": total})

    def _security(self, security: SecurityConfig) -> SecurityConfig:
        rate, in_flight = security.requests_per_second / len(self.urls), self._part(security.max_in_flight)
        return security.model_copy(update={"requests_per_second": rate, "max_in_flight": in_flight})

    def _reactive(self, reactive: ReactiveConsumerConfig) -> ReactiveConsumerConfig:
        flow, batch, consumer = reactive.flow, reactive.batch, reactive.consumer
        records, size = self._part(flow.max_records, batch.max_records), self._part(flow.max_bytes, batch.max_bytes)
        changes: dict[str, Any] = {"flow": FlowControl(max_records=records, max_bytes=size)}
        if identity := consumer.properties.get(_STATIC_MEMBER):
            own = {**consumer.properties, _STATIC_MEMBER: f"{identity}-{self.number}"}
            changes["consumer"] = consumer.model_copy(update={"properties": own})
        return reactive.model_copy(update=changes)


def process_count(config: HeadraceConfig) -> int:
    """Return how many processes a run has."""
    if config.processes != "auto":
        return config.processes
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(_MOST_OF_AUTO, cores)
