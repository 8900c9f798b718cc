"""Finds the principal of a request by its headers or the client's certificate, depending on the mode."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from headrace import errors
from headrace.config.http import JwtConfig, SecurityConfig
from headrace.extras import not_installed
from headrace.http.auth.principals import Principal, RequestCaller, TokenExpired, TokenRefused
from headrace.http.auth.rate_limit import FailureDelay, RateLimit, RequestsInFlight
from headrace.runtime import Clock, Service

if TYPE_CHECKING:
    from headrace.http.auth.tokens import Tokens

log = logging.getLogger(__name__)

_SCOPE_TOKEN: Final = b"x-scope-token"


class Authenticator:
    """Authenticates requests, and limits the requests of each principal and the failures of each address."""

    def __init__(self, settings: SecurityConfig, clock: Clock) -> None:
        """Prepare for a mode other than `none`.

        Raises:
            ConfigError: The token library is not installed.
        """
        self._mode = settings.mode
        self._jwt = settings.jwt
        self._clock = clock
        self.in_flight = RequestsInFlight(settings.max_in_flight)
        """Requests of each principal."""
        self.judged_again: set[Callable[[], None]] = set()
        """Called after each change; requests in progress add themselves."""
        self.change(settings)
        self.services: list[Service] = []
        self._tokens = self._signed_tokens(settings.jwt, clock) if settings.mode == "jwt" else None
        self._failures = FailureDelay(clock)

    def change(self, settings: SecurityConfig) -> None:
        """Take the principals and limits of changed settings; requests in progress and later ones are judged by them.

        Raises:
            ConfigError: The mode or the settings of signed tokens differ, which needs a restart.
        """
        if (settings.mode, settings.jwt) != (self._mode, self._jwt):
            raise errors.ConfigError("security.mode and security.jwt have changed, and need a restart")
        self._scopes = {name: frozenset(one.scopes) for name, one in settings.principals.items()}
        # By digest, so that the time of a look-up reveals nothing about a token.
        self._by_digest = {
            _digest(one.token.get_secret_value()): Principal(name, self._scopes[name])
            for name, one in settings.principals.items()
        }
        rate = settings.requests_per_second
        self._requests = RateLimit(rate, self._clock) if rate else None
        self.in_flight.limit = settings.max_in_flight
        for judge_again in self.judged_again:
            judge_again()

    async def identify(
        self, headers: Mapping[bytes, bytes], certificate: Mapping[str, Any] | None, address: str, *, wait: bool = True
    ) -> Principal:
        """Return the principal of a request; `certificate` is the result of `ssl.SSLSocket.getpeercert`.

        With `wait=False`, an address that is delayed for wrong tokens gets TooManyRequests at once.

        Raises:
            AuthTokenMissing, AuthTokenInvalid, AuthTokenExpired, ScopeTokenInvalid, ScopeTokenExpired: The request is
                not authenticated.
            TooManyRequests: The principal sends too many requests, or the address too many wrong tokens.
        """
        if not wait and self._failures.applies(address):
            raise errors.TooManyRequests("too many wrong tokens from this address")
        try:
            principal = await self._judge(headers, certificate)
        except errors.AuthTokenMissing:
            raise
        except errors.Unauthenticated:
            # Only failures are delayed; a valid token is accepted whatever else its address sends.
            await self._failed(address, wait=wait)
            raise
        if self._requests:
            self._requests.take(principal.name)
        return principal

    async def confirm(
        self, principal: Principal, headers: Mapping[bytes, bytes], certificate: Mapping[str, Any] | None
    ) -> None:
        """Return if `identify` would still return a principal with this name and these scopes; count nothing.

        Raises:
            AuthTokenInvalid, AuthTokenExpired, ScopeTokenInvalid, ScopeTokenExpired: The credentials have ended.
            AuthTokenScopeMismatch: They have another principal or other scopes now.
        """
        now = await self._judge(headers, certificate)
        if (now.name, now.scopes) != (principal.name, principal.scopes):
            raise errors.AuthTokenScopeMismatch("the scopes of this caller have changed: send the request again")

    def remaining_seconds(self, principal: Principal) -> float:
        """Return the time until its credentials expire."""
        return principal.expires_at - self._clock.time()

    async def _judge(self, headers: Mapping[bytes, bytes], certificate: Mapping[str, Any] | None) -> Principal:
        in_scope_token = False
        try:
            principal = await self._principal(headers, certificate)
            if not (scope_token := headers.get(_SCOPE_TOKEN)):
                return principal
            in_scope_token = True
            kind, _, token = scope_token.decode("latin-1").rpartition(" ")
            if kind.lower() not in ("bearer", ""):  # light-4j clients send the prefix, others do not
                raise TokenRefused("not a bearer token")
            second = await self._by_token(token)
        except TokenRefused as refused:
            raise _error_of(refused, in_scope_token=in_scope_token) from None
        ends = min(principal.expires_at, second.expires_at)
        return dataclasses.replace(principal, scopes=second.scopes, by_scope_token=True, expires_at=ends)

    async def _failed(self, address: str, *, wait: bool) -> None:
        seconds = self._failures.count(address)
        if wait and seconds:
            await self._clock.sleep(min(seconds, FailureDelay.MOST_SECONDS))
        if seconds > FailureDelay.MOST_SECONDS:
            raise errors.TooManyRequests("too many wrong tokens from this address: wait, then send a valid one")

    def known(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Return what `identify` would return if the token is cached; count nothing."""
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if self._mode == "mtls" or _SCOPE_TOKEN in headers or kind.lower() != "bearer":
            return None
        return self._tokens.known(token) if self._tokens else self._by_digest.get(_digest(token))

    def enter(self, caller: RequestCaller, *, is_counted: bool = True) -> None:
        """Count a request until `leave`, and for the rate of its caller unless `identify` has.

        Raises:
            TooManyRequests: The caller sends too many.
        """
        if caller.principal is None:
            return
        name = caller.principal.name
        self.in_flight.enter(name)
        caller.is_in_flight = True
        if not is_counted and self._requests:
            self._requests.take(name)
        caller.is_counted = True

    def leave(self, caller: RequestCaller) -> None:
        """Stop counting a request that is in flight."""
        if caller.is_in_flight and caller.principal:
            caller.is_in_flight = False
            self.in_flight.leave(caller.principal.name)

    async def _principal(self, headers: Mapping[bytes, bytes], certificate: Mapping[str, Any] | None) -> Principal:
        if self._mode == "mtls":
            name = self._certified_name(certificate or {})
            ends = _end_of(certificate["notAfter"]) if certificate else 0
            if ends < self._clock.time():  # a connection may last longer
                raise TokenExpired("certificate")
            return Principal(name, self._scopes.get(name, frozenset()), expires_at=ends)
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if not kind:
            raise errors.AuthTokenMissing()
        if kind.lower() != "bearer" or not token:
            raise TokenRefused("not a bearer token")
        return await self._by_token(token)

    async def _by_token(self, token: str) -> Principal:
        if self._tokens:
            return await self._tokens.principal_of(token)
        principal = self._by_digest.get(_digest(token)) if token else None
        if principal is None:
            raise TokenRefused("unknown token")
        return principal

    def _signed_tokens(self, settings: JwtConfig, clock: Clock) -> Tokens:
        try:  # here, because the library is an extra
            from headrace.http.auth.keys import Keys
            from headrace.http.auth.tokens import Tokens
        except ImportError as cause:
            problem = not_installed("security.mode jwt", cause.name or "joserfc", "security")
            raise errors.ConfigError(problem.description) from cause
        keys = Keys(settings, clock)
        self.services.append(keys)
        return Tokens(settings, keys, clock)

    def _certified_name(self, certificate: Mapping[str, Any]) -> str:
        """Return the first name of a certificate that is configured, else its first name."""
        names: list[str] = [name for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")]
        names += [name for part in certificate.get("subject", ()) for kind, name in part if kind == "commonName"]
        if not names:
            raise errors.AuthTokenMissing("this server requires a client certificate that names its owner")
        return next((name for name in names if name in self._scopes), names[0])


@functools.lru_cache(1000)
def _end_of(text: str) -> float:
    return ssl.cert_time_to_seconds(text)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _error_of(refused: TokenRefused, *, in_scope_token: bool) -> errors.HeadraceError:
    log.debug("rejected a token: %s", refused)
    if isinstance(refused, TokenExpired):
        return errors.ScopeTokenExpired() if in_scope_token else errors.AuthTokenExpired()
    return errors.ScopeTokenInvalid() if in_scope_token else errors.AuthTokenInvalid()
