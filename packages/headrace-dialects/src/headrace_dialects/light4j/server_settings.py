"""The listener, the check of tokens and pushes of metrics that a light-4j folder sets, and stores of certificates."""

import contextlib
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from headrace.config.yaml_tree import KeyPath
from headrace_dialects.light4j.folder import LightFolder
from headrace_dialects.light4j.placeholders import Setting

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_SECURITY: Final = "HEADRACE__SECURITY__"
_PEM: Final = b"-----BEGIN"
Written = Iterator[tuple[KeyPath, Setting, Any]]
"""Path, source and value of settings."""


def listener(folder: LightFolder) -> Written:
    """Yield the settings of the listener, and report what they cannot be."""
    get = folder.get
    https, dynamic, host = get("server", "enableHttps"), get("server", "dynamicPort"), get("server", "ip")
    has_tls = _has_tls(folder)
    port = get("server", "httpsPort" if has_tls else "httpPort")
    yield ("http", "port"), dynamic if dynamic.is_on else port, 0 if dynamic.is_on else port.value
    if has_tls:
        store = get("server", "keystoreName")
        if pem_store(folder, store if store.written else https, store, with_key=True):
            for name in ("certificate", "key"):
                yield ("http", "tls", name), store, str(folder.path_of(str(store.value)))
        two_way, trusted = get("server", "enableTwoWayTls"), get("server", "truststoreName")
        if two_way.is_on and pem_store(folder, trusted if trusted.written else two_way, trusted, with_key=False):
            yield ("http", "tls", "client_ca"), trusted, str(folder.path_of(str(trusted.value)))
    elif not https.written:
        store = get("server", "keystoreName")
        why = "the packaged key is public; for HTTPS add server.keystore as a PEM file with certificate and key"
        if folder.path_of(str(store.value)).is_file():
            why = f"{store.value} is not PEM. To convert it, run: {_conversion(folder.path_of(str(store.value)))}"
        folder.remark(https._replace(written=True), f"this is HTTP on port {port.value}: {why}")
    if host.value in _LOOPBACK or (has_tls and _has_security(folder)):
        yield ("http", "host"), host, host.value
    else:
        why = "without TLS and authentication Headrace listens on 127.0.0.1 only"
        folder.remark(host._replace(written=True), why)


def pushed_metrics(folder: LightFolder) -> Written:
    """Yield where metrics are pushed to, if the folder says that they are."""
    get = partial(folder.get, "metrics")
    enabled, host, port, user = get("enabled"), get("serverHost"), get("serverPort"), get("serverUser")
    if not enabled.is_on or not (enabled.written or host.written):
        return
    path, name, minutes = get("serverPath"), get("serverName"), get("reportInMinutes")
    prefix = str(path.value or "").strip("/")
    base = f"{get('serverProtocol').value}://{host.value}:{port.value}/{prefix + '/' if prefix else ''}"
    at: KeyPath = ("metrics", "influxdb")
    source = next((one for one in (host, port, name, enabled) if one.written), host)
    yield (*at, "url"), source, f"{base}write?{urlencode({'db': str(name.value)})}"
    if user.value:
        password = get("serverPass")
        yield (*at, "token"), password if password.written else user, f"{user.value}:{password.value}"
    if minutes.written:
        known = isinstance(minutes.value, int | float) and not isinstance(minutes.value, bool)
        yield (*at, "interval_seconds"), minutes, minutes.value * 60 if known else minutes.value


def token_check(folder: LightFolder) -> Written:
    """Report a check of tokens that the environment does not complete; nothing is yielded."""
    check = folder.get("security", "enableVerifyJwt")
    if _has_security(folder) or (check.written and not check.is_on):
        return
    if check.written:
        names = f"{_SECURITY}MODE=jwt, {_SECURITY}JWT__ISSUER, {_SECURITY}JWT__AUDIENCE and {_SECURITY}JWT__JWKS_URL"
        text = "needs an issuer, an audience and keys, which light-4j's files do not have: set the variables"
        folder.refuse(check, f"{text} {names}; or write false, for callers of this machine only")
    else:
        why = f"no issuer and no keys are known; any caller of this machine may call. Set {_SECURITY}MODE to change it"
        folder.remark(check._replace(written=True), why)
    yield from ()


def pem_store(folder: LightFolder, named_at: Setting, store: Setting | None = None, *, with_key: bool) -> bool:
    """Return whether a store is a PEM file; otherwise report how to convert it.

    Args:
        folder: Has the file.
        named_at: Where a problem is reported.
        store: Has the name of the file; by default `named_at`.
        with_key: Whether it holds a key, and not only certificates.
    """
    path = folder.path_of(str((store or named_at).value))
    try:
        content = path.read_bytes()
    except OSError as cause:
        folder.refuse(named_at, f"needs the file {path}, in PEM, which cannot be read: {cause.strerror}. Add it")
        return False
    if _PEM in content:
        return True
    name = shlex.quote(str(path))
    command = _conversion(path) if with_key else f"keytool -list -rfc -keystore {name} > {name}.pem"
    folder.refuse(named_at, f"names {path}, which is not PEM. To convert it, run: {command}; then name {path.name}.pem")
    return False


def _conversion(store: Path) -> str:
    """Return the commands that make a PEM file of a store of Java with a key."""
    name = shlex.quote(str(store))
    command = f"keytool -importkeystore -srckeystore {name} -destkeystore {name}.p12 -deststoretype PKCS12 && "
    return command + f"openssl pkcs12 -in {name}.p12 -nodes -out {name}.pem && chmod 600 {name}.pem"


def _has_tls(folder: LightFolder) -> bool:
    """Return whether the listener has TLS, which is light-4j's default.

    It does not if the folder has no store. One that is not PEM is refused, unless the folder names a port of HTTP.
    """
    https, http = folder.get("server", "enableHttps"), folder.get("server", "enableHttp")
    port, store = folder.get("server", "httpPort"), folder.path_of(str(folder.get("server", "keystoreName").value))
    if https.written:
        return https.is_on
    if not store.is_file():
        return False
    with contextlib.suppress(OSError):  # then it is refused as a file that cannot be read
        return _PEM in store.read_bytes() or not (port.written or http.is_on)
    return True


def _has_security(folder: LightFolder) -> bool:
    return any(name.upper().startswith(_SECURITY) for name in folder.environ)
