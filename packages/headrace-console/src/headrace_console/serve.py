"""The console's process: its pages, its listener, and what it refuses to start with."""

from __future__ import annotations

import asyncio
import importlib
import os
import pkgutil
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Final, NamedTuple

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from nicegui import Client, background_tasks, core, ui
from nicegui import app as nicegui_app
from starlette.responses import Response

from headrace.errors import ConfigError, EnvironmentProblem
from headrace_console import frame, pages
from headrace_console.feeds import Feeds, History
from headrace_console.guard import LOOPBACK, SESSION, Guard
from headrace_console.server_api import Servers
from headrace_console.sessions import Session, Sessions
from headrace_console.view import PAGES, Page, View

GROUP: Final = "headrace.console.pages"
"""The group of entry points by which another package registers modules with pages."""
_BACKLOG: Final = 128
_BUILD_SECONDS: Final = 1.0
_RESPONSE_SECONDS: Final = 30.0
_MOST_UNOPENED: Final = 100
_HISTORY_MESSAGES: Final = 200


class ConsoleSettings(NamedTuple):
    """What a console is started with."""

    urls: Sequence[str]
    management: str = ""
    trusted: ssl.SSLContext | None = None
    """Whose certificates the API may have; by default those of the system's authorities."""
    token: str = ""
    host: str = "127.0.0.1"
    port: int = 8090
    certificate: str = ""
    key: str = ""
    hosts: Sequence[str] = ()


class Console:
    """What all pages of a process share."""

    def __init__(self, settings: ConsoleSettings) -> None:
        self.servers = Servers(settings.urls, settings.management, settings.trusted)
        self.sessions = Sessions(settings.token)
        self.history = History()
        self._feeds = Feeds(self.servers, self.sessions)

    def register(self) -> None:
        """Make every page known to NiceGUI."""
        for module in pkgutil.iter_modules(pages.__path__):
            importlib.import_module(f"{pages.__name__}.{module.name}")
        for point in entry_points(group=GROUP):
            point.load()
        for page in PAGES:
            self._register(page)

    def _register(self, page: Page) -> None:
        async def build(request: Request) -> Response | None:
            session: Session = request.scope.get(SESSION, self.sessions.shared)
            client = ui.context.client
            _drop_unopened()
            if not session.token and await self.servers.needs_token(_BUILD_SECONDS):
                client.delete()
                return RedirectResponse("/login", 303)
            view = View(client, session, self.servers, self._feeds, self.history)

            async def built() -> None:
                if not client.is_deleted:
                    with client:
                        await frame.build(page, view)

            task = background_tasks.create(built(), name=f"build {page.path}")
            await asyncio.wait({task}, timeout=_BUILD_SECONDS)  # the rest comes over the web socket
            if task.done():
                task.result()
            return None

        build.__annotations__ = {"request": Request}
        ui.page(page.path, title=f"{page.title} - Headrace", response_timeout=_RESPONSE_SECONDS)(build)


def _drop_unopened() -> None:
    """Forget the oldest pages that no browser has opened, if there are many."""
    unopened = [one for one in Client.instances.values() if not one.has_socket_connection]
    for client in sorted(unopened, key=lambda one: one.created)[:-_MOST_UNOPENED]:
        client.delete()


def serve(settings: ConsoleSettings, announce: Callable[[str], object]) -> None:
    """Serve the console until a signal, and announce its address.

    Raises:
        ConfigError: The address is not a loopback one, and TLS or the server's authentication is missing.
        EnvironmentProblem: The port is not free.
    """
    console = Console(settings)
    if settings.host not in LOOPBACK:
        asyncio.run(_check_open(settings))
    listener = _listen(settings)
    secure = bool(settings.certificate)
    port = listener.getsockname()[1]
    console.register()
    outer = FastAPI(openapi_url=None)
    ui.run_with(
        outer,
        title="Headrace",
        language="en-US",
        dark=None,
        tailwind=False,
        binding_refresh_interval=None,
        message_history_length=_HISTORY_MESSAGES,
        gzip_middleware_factory=None,
        show_welcome_message=False,
    )
    core.app.config.socket_io_js_transports = ["websocket"]
    guard = Guard(
        outer,
        servers=console.servers,
        sessions=console.sessions,
        hosts={*LOOPBACK, settings.host, *settings.hosts},
        cookie=f"headrace_console_{port}",
        secure=secure,
    )
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    nicegui_app.on_startup(lambda: _started(announce, f"{'https' if secure else 'http'}://{shown}:{port}"))
    config = uvicorn.Config(
        guard,
        log_level="warning",
        access_log=False,
        server_header=False,
        http="h11",  # uvicorn's other parser reads the body of a request with Upgrade as the next request
        ws="wsproto",
        ssl_certfile=settings.certificate or None,
        ssl_keyfile=settings.key or None,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _started(announce: Callable[[str], object], url: str) -> None:
    # Nothing has to be saved, so an open page does not delay the end.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    announce(f"console {url}")


def _listen(settings: ConsoleSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as cause:
        raise EnvironmentProblem(
            f"the console cannot listen on {settings.host} port {settings.port} ({cause.strerror}): choose another "
            "with --port, or console.port in headrace.yaml"
        ) from cause


async def _check_open(settings: ConsoleSettings) -> None:
    servers = Servers(settings.urls, settings.management, settings.trusted)
    try:
        protected = bool(settings.certificate) and not settings.token and await servers.needs_token()
    finally:
        await servers.close()
    if not protected:
        raise ConfigError(
            f"the console would be open to other machines at {settings.host}: it needs TLS (--certificate and --key), "
            "a running Headrace that authenticates (security.mode), and no HEADRACE_TOKEN; or listen on 127.0.0.1"
        )
