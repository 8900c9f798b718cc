"""TLS 1.2 or newer for the listener and for HTTP clients; changed files are reloaded."""

import functools
import logging
import ssl
from pathlib import Path

from headrace.config.backend import ClientTls
from headrace.config.http import TlsConfig
from headrace.config.references import FileChanges
from headrace.errors import ConfigError
from headrace.runtime import Clock, Service

log = logging.getLogger(__name__)


@functools.lru_cache(32)
def certificate_end(pem: bytes) -> float:
    """Return the same as `first_end`; not a number if no certificate is there."""
    try:
        return first_end(pem)
    except ValueError:
        return float("nan")


def first_end(pem: bytes) -> float:
    """Return when the first of some certificates expires, in seconds since the epoch; ValueError if none is there."""
    from cryptography import x509  # only with TLS, because it takes a while

    return min(each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(pem))


class WatchedFiles(Service):
    """A TLS context; new connections use the present files."""

    _protocol: ssl._SSLMethod

    def __init__(self, setting: str, files: tuple[Path | None, ...], clock: Clock) -> None:
        super().__init__(f"tls files of {setting}")
        self.setting = setting
        """Section of the configuration."""
        self._files = files  # the own certificate first
        self._clock = clock
        self._changes = FileChanges(files)
        self._end = float("nan")
        try:
            self.context = self._fill(self._new())
        except (OSError, ssl.SSLError) as cause:
            raise ConfigError(f"{setting}: {self._problem(cause)}") from cause

    async def start(self) -> None:
        if self._files[0]:
            self.publish("headrace_certificate_expires_seconds", lambda: self._end, setting=self.setting)
        await super().start()

    def look(self) -> None:
        """Load changed files if they match; otherwise keep the previous ones."""
        if not self._changes.found():
            return
        try:
            self.load()
        except ConfigError as cause:
            log.warning("%s. Keeping the previous ones, will retry", cause.description)

    def load(self) -> None:
        """Load the files; ConfigError if they do not match, and the previous ones stay."""
        try:
            # Certificate and key are written one after the other: a new context shows whether they match.
            self._fill(self._new())
            self._fill(self.context)
            log.info("reloaded the certificates of %s", self.setting)
        except (OSError, ssl.SSLError) as cause:
            raise ConfigError(f"{self.setting}: {self._problem(cause)}") from cause

    async def run(self) -> None:
        while True:
            await self._clock.sleep(FileChanges.LOOK_SECONDS)
            self.look()

    def _new(self) -> ssl.SSLContext:
        context = ssl.SSLContext(self._protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        return context

    def _fill(self, context: ssl.SSLContext) -> ssl.SSLContext:
        raise NotImplementedError

    def _look_at_end(self, certificate: Path | None) -> None:
        self._end = certificate_end(certificate.read_bytes()) if certificate else float("nan")

    def _problem(self, cause: OSError) -> str:
        files = ", ".join(str(path) for path in self._files if path)
        return f"the files {files} are not a certificate, key and authorities that match ({cause.strerror or cause})"


class TlsFiles(WatchedFiles):
    """The listener's TLS context."""

    _protocol = ssl.PROTOCOL_TLS_SERVER

    def __init__(self, settings: TlsConfig, clock: Clock, setting: str = "http.tls") -> None:
        """Read the files; `setting` is their section of the configuration.

        Raises:
            ConfigError: They do not fit together, or are not certificates.
        """
        self._settings = settings
        super().__init__(setting, (settings.certificate, settings.key, settings.client_ca), clock)

    def _fill(self, context: ssl.SSLContext) -> ssl.SSLContext:
        self._look_at_end(self._settings.certificate)
        # An empty password makes an encrypted key an error instead of a prompt at the terminal.
        context.load_cert_chain(str(self._settings.certificate), str(self._settings.key), password=lambda: "")
        if self._settings.client_ca:
            context.load_verify_locations(str(self._settings.client_ca))
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class ClientTlsFiles(WatchedFiles):
    """The TLS context of an HTTP client; name and certificate of the server are always checked."""

    _protocol = ssl.PROTOCOL_TLS_CLIENT

    def __init__(self, setting: str, settings: ClientTls, clock: Clock) -> None:
        """Read the files; `setting` is their section of the configuration.

        Raises:
            ConfigError: They do not fit together, or are not certificates.
        """
        self._settings = settings
        super().__init__(setting, (settings.certificate, settings.key, settings.ca), clock)

    def _fill(self, context: ssl.SSLContext) -> ssl.SSLContext:
        settings = self._settings
        self._look_at_end(settings.certificate)
        if settings.certificate and settings.key:
            context.load_cert_chain(settings.certificate, settings.key, lambda: "")
        if settings.ca:
            context.load_verify_locations(settings.ca)
        else:
            context.load_default_certs()
        return context
