"""What one of several processes needs to work together with the others."""

from collections.abc import Callable, Sequence
from typing import Final

from headrace.config.http import HttpConfig, TlsConfig
from headrace.config.peer_processes import ClusterConfig
from headrace.config.process_share import ProcessShare
from headrace.http.application import Application
from headrace.http.forwarding import Forwarder
from headrace.http.other_processes import OtherProcesses
from headrace.http.server import WebService
from headrace.runtime import Clock
from headrace.runtime.process_link import ProcessLink
from headrace.sidecar.produce.key_owners import KeyOwners

_SPARE_CONNECTIONS: Final = 64


class Several:
    """The part of one process in a run of several."""

    def __init__(self, share: ProcessShare, link: ProcessLink) -> None:
        """Prepare; `link` leads to the process that started this one."""
        self.share = share
        self.link = link
        self.others = OtherProcesses(
            share.number, {number: url for number, url in enumerate(share.urls) if number != share.number}
        )
        """The others, for requests that are about all."""
        self.private: WebService | None = None
        """The listener where the others reach this process."""

    def key_owners(self, forwarder: Forwarder) -> KeyOwners:
        """Return what finds the process of an idempotency key."""
        return KeyOwners(forwarder, self.share.urls, self.share.url)

    def listen_privately(self, http: HttpConfig, application: Application, clock: Clock) -> WebService:
        """Make the listener for the others: on loopback, without TLS, with the same access rules as that of clients."""
        most = ClusterConfig.max_forwarded * len(self.share.urls) + _SPARE_CONNECTIONS
        port = int(self.share.url.rpartition(":")[2])
        own = http.model_copy(
            update={"host": "127.0.0.1", "port": port, "tls": TlsConfig(), "management": None, "max_connections": most}
        )
        self.private = WebService(own, application, name="processes", clock=clock)
        return self.private

    def open(self, webs: Sequence[WebService], drain: Callable[[], None]) -> None:
        """Have listeners share their ports, and take what the process that started this one says; `drain` begins it."""
        for web in [*webs, *filter(None, [self.private])]:
            web.reuse_port = True
        self.link.watch(drain)
