"""TLS of the listener: 1.2 or newer, and files that are read again when they change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Final

from headrace.config.http import TlsConfig
from headrace.errors import ConfigError
from headrace.lifecycle import Clock, Service

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 10.0


class TlsFiles(Service):
    """The listener's TLS context; connections made after a file has changed see the new one."""

    def __init__(self, settings: TlsConfig, clock: Clock) -> None:
        """Read the files.

        Raises:
            ConfigError: They do not fit together or are no certificates.
        """
        super().__init__("tls files")
        self._settings = settings
        self._clock = clock
        self._seen = self._state()
        try:
            self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except (OSError, ssl.SSLError) as cause:
            raise ConfigError(f"http.tls: {self._problem(cause)}") from cause

    async def start(self) -> None:
        self.spawn(self._watch(), "watch")

    def look(self) -> None:
        """Take over files that have changed and fit together; otherwise the old ones go on to be used."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            # Certificate and key are two files, written one after the other: a trial shows whether they match yet.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
            log.info("the listener's certificate was read again")
        except (OSError, ssl.SSLError) as cause:
            log.warning("http.tls: %s. The files read before are used on", self._problem(cause))

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            self.look()

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        # No password: a key that is locked is refused instead of being asked for at a terminal.
        context.load_cert_chain(str(self._settings.certificate), str(self._settings.key), password=lambda: "")
        if self._settings.client_ca:
            context.load_verify_locations(str(self._settings.client_ca))
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _state(self) -> list[tuple[int, int] | None]:
        return [_stamp(path) for path in (self._settings.certificate, self._settings.key, self._settings.client_ca)]

    def _problem(self, cause: OSError) -> str:
        files = f"{self._settings.certificate}, {self._settings.key}"
        if self._settings.client_ca:
            files += f", {self._settings.client_ca}"
        return (
            f"the files {files} are no certificate, key and authorities that fit together ({cause.strerror or cause})"
        )


def _stamp(path: Path | None) -> tuple[int, int] | None:
    try:
        found = path.stat() if path else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino) if found else None
