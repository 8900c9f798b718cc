"""OpenTelemetry's variables that say whether a signal is exported; the exporter reads the others itself."""

from collections.abc import Mapping
from typing import Final, Literal
from urllib.parse import urlsplit

from headrace.errors import EnvironmentProblem
from headrace.extras import require

_OTLP: Final = "OTEL_EXPORTER_OTLP"
_PROTOCOL: Final = "http/protobuf"


def is_exported(signal: Literal["TRACES", "METRICS"], environ: Mapping[str, str]) -> bool:
    """Return whether the variables name an endpoint for a signal, and do not switch it off.

    Raises:
        EnvironmentProblem: A package is missing, or a variable is not usable.
    """
    given = {name: value.strip() for name, value in environ.items()}
    exporter = given.get(f"OTEL_{signal}_EXPORTER", "").lower()
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    names = {what: [f"{_OTLP}_{signal}_{what}", f"{_OTLP}_{what}"] for what in ("ENDPOINT", "PROTOCOL")}
    name, endpoint = next(((name, given[name]) for name in names["ENDPOINT"] if given.get(name)), ("", ""))
    if not endpoint:
        return False
    require("otel", f"an OTLP endpoint is set ({name}), and it")
    if not _is_url(endpoint):
        raise EnvironmentProblem(f"{name} should be a URL such as http://localhost:4318")
    protocol = next((given[name] for name in names["PROTOCOL"] if given.get(name)), _PROTOCOL)
    if protocol != _PROTOCOL:
        raise EnvironmentProblem(
            f"{_OTLP}_PROTOCOL is {protocol[:40]!r}: Headrace exports by {_PROTOCOL} only, usually to port 4318; "
            "remove the variable"
        )
    return True


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
