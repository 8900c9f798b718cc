"""Settings that are meant to protect and cannot: they are refused, because a start without them looks protected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.config.http import JwtConfig
from headrace.config.model import HeadraceConfig
from headrace.config.yaml_tree import Path


def unprotected(config: HeadraceConfig) -> Iterator[tuple[Path, str]]:
    """Yield each setting that protects nothing: its path and what to do."""
    shared, own = config.kafka.properties, config.producer.properties
    yield from _of_clients(("kafka", "properties"), shared, shared)
    yield from _of_clients(("producer", "properties"), own, {**shared, **own})
    security = config.security
    if security.mode == "none" and (security.principals or security.jwt != JwtConfig()):
        sentence = "principals or jwt are set, but mode is none, so every caller may do everything: set mode"
        yield ("security",), sentence
    if security.mode == "jwt" and security.principals:
        sentence = "has no effect in mode jwt, where each token brings its own scopes: remove it, or set another mode"
        yield ("security", "principals"), sentence
    registry = config.schema_registry
    if registry.password.get_secret_value() and not registry.username:
        yield ("schema_registry", "password"), "is never sent without a username: set username, or remove it"


def _of_clients(path: Path, written: Mapping[str, Any], effective: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield properties of TLS and login that the client ignores. Source: librdkafka's security.protocol."""
    protocol = str(effective.get("security.protocol", "plaintext")).lower()
    for name in written:
        if name.startswith("sasl.") and not protocol.startswith("sasl_"):
            wanted = "sasl_ssl"
        elif name.startswith("ssl.") and not protocol.endswith("ssl"):
            wanted = "sasl_ssl" if protocol.startswith("sasl_") else "ssl"
        else:
            continue
        yield (
            (*path, name),
            f"has no effect, because security.protocol is {protocol}: set security.protocol: {wanted} there, or "
            "remove it",
        )
