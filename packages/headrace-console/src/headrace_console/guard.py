"""What protects the console in a browser: host names, origins, sessions, headers, and the login form.

It checks every request to the console, and every web socket.
"""

from __future__ import annotations

import html
import secrets
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs, urlsplit

from nicegui import Client
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_console.server_api import ApiProblem, Servers
from headrace_console.sessions import Session, Sessions

SESSION: Final = "headrace.session"
"""Where a request has its session."""
LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "::1"))
_SOCKET: Final = "/_nicegui_ws"
_MOST_BODY_BYTES: Final = 20_000
_MOST_LOGINS: Final = 8
_FORM: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Log in - Headrace</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root{{color-scheme:light dark}}body{{font:16px sans-serif;max-width:26rem;margin:10vh auto;padding:0 1rem}}
label,input,button{{display:block;width:100%;box-sizing:border-box;margin:.5rem 0;font:inherit;padding:.4rem 0}}
</style></head><body><main><h1>Headrace</h1><p>{server} needs a token.</p>
<form method="post" action="/login"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="off" required autofocus>
<button>Log in</button></form><p role="alert">{problem}</p></main></body></html>"""


class Guard:
    """Refuses what comes from other sites, and finds the session of the rest."""

    def __init__(
        self, app: ASGIApp, *, servers: Servers, sessions: Sessions, hosts: Collection[str], cookie: str, secure: bool
    ) -> None:
        """Stand before `app`.

        Args:
            app: What serves the pages.
            servers: Where a token is tried.
            sessions: The sessions.
            hosts: Host names under which the console may be called.
            cookie: Name of the cookie. Cookies do not depend on the port, so it has to.
            secure: Whether the console serves HTTPS.
        """
        self.app = app
        # Settings.
        self._servers = servers
        self._sessions = sessions
        self._hosts = {name.lower() for name in hosts}
        self._cookie = cookie
        self._secure = secure
        # Logins that are tried now.
        self._trying = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        cookie = _cookie_of(headers, self._cookie)
        session = scope[SESSION] = self._sessions.find(cookie)
        problem = self._problem(scope, headers, session)
        if problem:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": problem[:100]})
            else:
                await PlainTextResponse(problem, 403)(scope, receive, self._protected(send, ""))
            return
        nonce = secrets.token_urlsafe(16)
        protected = self._protected(send, nonce) if scope["type"] == "http" else send
        path, method = scope["path"], scope.get("method", "")
        if path == "/login" and scope["type"] == "http":
            await (await self._log_in(receive, method))(scope, receive, protected)
        elif path == "/logout" and method == "POST":
            self._sessions.end(cookie)
            left = RedirectResponse("/login", 303)
            left.delete_cookie(self._cookie)
            await left(scope, receive, protected)
        else:
            await self.app(scope, receive, protected)

    def _problem(self, scope: Scope, headers: Headers, session: Session) -> str:
        """Return why a request is refused; empty if it is not."""
        host = headers.get("host", "")
        if _name_of(f"//{host}") not in self._hosts:
            return "this host name is not allowed here: use the address that the console has printed"
        changes = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
        origin = headers.get("origin")
        if changes and (urlsplit(origin or "").netloc.lower() != host.lower()):
            return "the request comes from another site"
        if scope["path"].startswith(_SOCKET):
            if scope["type"] != "websocket":
                return "only web sockets are served here"
            named = QueryParams(scope["query_string"]).getlist("client_id")
            if len(named) != 1:  # NiceGUI refuses a handshake for another page only if the address names this one
                return "a web socket belongs to one page"
            client = Client.instances.get(named[0])
            if client and client.request.scope.get(SESSION) is not session:
                return "the session has ended: load the page again"
        return ""

    def _protected(self, send: Send, nonce: str) -> Send:
        """Return a `send` that adds the headers of protection, and the nonce to the scripts of a page."""
        start: list[Message] = []
        parts: list[bytes] = []

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                _protect(headers, nonce)
                if headers.get("content-type", "").startswith("text/html"):
                    start.append(message)
                    return
            elif start:
                parts.append(message.get("body", b""))
                if message.get("more_body"):
                    return
                page = b"".join(parts).replace(b"<script", f'<script nonce="{nonce}"'.encode())
                MutableHeaders(raw=start[0]["headers"])["content-length"] = str(len(page))
                await send(start[0])
                message = {"type": "http.response.body", "body": page}
            await send(message)

        return protected

    async def _log_in(self, receive: Receive, method: str) -> Response:
        if method != "POST":
            return self._form("")
        body = b""
        more = True
        while more and len(body) <= _MOST_BODY_BYTES:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        token = parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip()
        if not token.isascii() or not token.isprintable() or " " in token or len(body) > _MOST_BODY_BYTES:
            return self._form("not a valid token: it is one word of ASCII")
        if self._trying >= _MOST_LOGINS:
            return self._form("too many others log in now: try again in a moment")
        self._trying += 1
        try:
            info = await self._servers.send(Session(token), "GET", "/adm/server/info", expected=(401, 403))
        except ApiProblem as problem:
            return self._form(str(problem))
        finally:
            self._trying -= 1
        if info.status == 401:
            return self._form(str(info.body.get("description", "the token is refused")))
        cookie = self._sessions.open(token)
        if info.status == 403:
            self._sessions.find(cookie).refused["admin"] = str(info.body.get("description", "it needs the scope admin"))
        done = RedirectResponse("/", 303)
        done.set_cookie(self._cookie, cookie, httponly=True, samesite="strict", secure=self._secure)
        return done

    def _form(self, problem: str) -> Response:
        text = _FORM.format(server=html.escape(self._servers.url), problem=html.escape(problem))
        return HTMLResponse(text, 401 if problem else 200)


def _protect(headers: MutableHeaders, nonce: str) -> None:
    # Styles are inline in Quasar, and Vue compiles templates while it runs: NiceGUI allows nothing stricter.
    script = f"script-src 'self' 'nonce-{nonce}' 'unsafe-eval'" if nonce else "script-src 'none'"
    headers["Content-Security-Policy"] = (
        f"default-src 'none'; {script}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    headers["X-Frame-Options"] = "DENY"
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "same-origin"  # without referrers, browsers hide the origin of forms, too
    headers.setdefault("Cache-Control", "no-store")


def _name_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _cookie_of(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found else ""
