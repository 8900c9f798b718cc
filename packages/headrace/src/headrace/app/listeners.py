"""The HTTP listeners of one process, and the endpoints that each serves."""

import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from headrace.config.http import HttpConfig, TlsConfig
from headrace.config.peer_processes import ClusterConfig
from headrace.http.application import Application, Router
from headrace.http.auth import Authenticator
from headrace.http.endpoint import OPEN
from headrace.http.server import WebService
from headrace.process_context import ProcessContext
from headrace.runtime import Service
from headrace.runtime.feature_parts import NeededParts, Parts, Reload
from headrace.runtime.tls import TlsFiles

_SPARE_CONNECTIONS: Final = 64


class ListenerParts(Parts):
    """Every listener. The main one is the last to start and the first to drain."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._context = context
        self._process = process = context.process
        config, clock = context.config, context.clock
        self._others = [*needed.by_name.values()]
        self._services: list[Service] = []
        self._authenticator = self._guard()
        tls = self._tls_files(config.http.tls)
        families = [family for parts in self._others for family in parts.endpoints]
        own_host = urlsplit(config.cluster.url or "").hostname
        http = config.http.model_copy(update={"allowed_hosts": [*config.http.allowed_hosts, *filter(None, [own_host])]})
        self.management = self._management(http, families)
        """The listener of administration, if there is one; it serves while all others drain."""
        management = self.management
        router = Router.of(families, http, context.audit, lambda one: not (management and one.administers))
        application = self._application(http, router, forwards=True)
        self.private: WebService | None = None
        """The listener where the other processes of the run reach this one."""
        if process.share:
            everything = self._application(http, Router.of(families, http, context.audit), forwards=True)
            self.private = self._private(http, everything)
            self._services.append(self.private)
        self.listeners_of_features = self._of_features(http, tls)
        process.gates.append(application.gate)
        self.web = WebService(config.http, application, tls=tls, clock=clock)
        for parts in self._others:
            parts.on_listener(self.web)
        self.all = [self.web, *([management] if management else []), *self.listeners_of_features]
        """Every listener of clients, the main one first."""
        process.urls = lambda: {web.name: web.url for web in self.all}

    def services(self) -> Sequence[Service]:
        management = [self.management] if self.management else []
        return [*self._services, *self.listeners_of_features, *management, self.web]

    def _guard(self) -> Authenticator | None:
        security = self._context.config.security
        if security.mode == "none":
            return None
        authenticator = Authenticator(security, self._context.clock)
        self._services += authenticator.services
        return authenticator

    def claim(self) -> None:
        """Take the ports, before anything starts; several processes share them.

        Raises:
            PortTaken: Another program listens on one.
        """
        for web in [*self.all, *filter(None, [self.private])]:
            web.reuse_port = bool(self._process.share)
        for web in self.all:
            web.claim()

    def reloads(self) -> Mapping[str, Reload]:
        if not (self._process.read_again and self._authenticator):
            return {}
        how = "reads principals and limits from the configuration"
        return {"security": Reload(how, self._change_security)}

    async def _change_security(self) -> None:
        assert self._authenticator
        security = (await self._process.read_config()).security
        self._authenticator.change(security)
        self._process.changed(security=security)

    def _application(self, http: HttpConfig, router: Any, *, forwards: bool = False) -> Application:
        context = self._context
        forwarder = self._process.forwarder if forwards else None
        return Application(http, router, context.metrics, self._authenticator, context.audit, forwarder)

    def _tls_files(self, settings: TlsConfig, name: str = "http.tls") -> ssl.SSLContext | None:
        """Return the certificates of a listener, and have them watched; None without any."""
        if not settings.certificate:
            return None
        files = TlsFiles(settings, self._context.clock, name)
        self._services.append(files)
        return files.context

    def _management(self, http: HttpConfig, families: Sequence[object]) -> WebService | None:
        context, settings = self._context, http.management
        if not settings:
            return None
        tls = self._tls_files(settings.tls, "http.management.tls")
        own = http.model_copy(update={"host": settings.host, "port": settings.port, "tls": settings.tls})
        router = Router.of(families, own, context.audit, lambda one: one.administers or one.rule == OPEN)
        web = WebService(own, self._application(own, router), name="management", tls=tls, clock=context.clock)
        web.outlives = True
        return web

    def _private(self, http: HttpConfig, application: Application) -> WebService:
        """Make the listener for the others: on loopback, without TLS, with the same access rules as that of clients."""
        share = self._process.share
        assert share
        most = ClusterConfig.max_forwarded * len(share.urls) + _SPARE_CONNECTIONS
        changes = {"host": "127.0.0.1", "port": int(share.url.rpartition(":")[2]), "tls": TlsConfig()}
        own = http.model_copy(update={**changes, "management": None, "max_connections": most})
        return WebService(own, application, name="processes", clock=self._context.clock)

    def _of_features(self, http: HttpConfig, tls: ssl.SSLContext | None) -> list[WebService]:
        """Make the listeners that features add."""
        made = []
        for parts in self._others:
            for own, router, name in parts.listeners(http):
                application = self._application(own, router)
                made.append(WebService(own, application, name=name, tls=tls, clock=self._context.clock))
                self._process.gates.append(application.gate)
        return made
