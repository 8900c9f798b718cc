"""Masks secrets in texts: those of the configuration, and what looks like one."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

from pydantic import BaseModel, SecretStr

from headrace.config.references import is_secret_name

MASK: Final = "**********"
"""Shown instead of a secret."""
_SHORTEST: Final = 6
"""A shorter secret is not searched for: it would match parts of ordinary words."""
_USER_OF_URL: Final = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_LOOKS_SECRET: Final = re.compile(
    r"((?:bearer|basic)\s+|(?:password|passphrase|secret|token|api[-_]?key)[\"']?\s?[:=]\s?[\"']?)[^\s\"',;&}]{4,}",
    re.IGNORECASE,
)


def without_users(text: str) -> str:
    """Return a text with the users and passwords of URLs masked."""
    return _USER_OF_URL.sub(MASK, text) if "@" in text else text


class SecretMask:
    """Replaces secrets in texts. Secrets in files are read again, and old ones stay masked."""

    def __init__(self, config: BaseModel) -> None:
        self._configs = [config]
        self._secrets: set[str] = set()
        self.look()

    def add(self, config: BaseModel) -> None:
        """Mask the secrets of a later configuration too."""
        self._configs = [self._configs[0], config]
        self.look()

    def look(self) -> None:
        """Take the present secrets of the configurations."""
        self._secrets |= {secret for secret in _secrets_of(self._configs) if len(secret) >= _SHORTEST}
        forms = {form for secret in self._secrets for form in (secret, json.dumps(secret)[1:-1], quote(secret))}
        self._pattern = re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))

    def __call__(self, text: str) -> str:
        if self._secrets:
            text = self._pattern.sub(MASK, text)
        return without_users(_LOOKS_SECRET.sub(rf"\1{MASK}", text))


def _secrets_of(value: Any, name: str = "") -> Iterator[str]:
    """Yield the secrets of a configuration, by their type or name, and the values of headers."""
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, BaseModel | dict):
        inner = name if name == "headers" else ""
        for key, item in value.items() if isinstance(value, dict) else value:
            yield from _secrets_of(item, inner or str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets_of(item, name)
    elif isinstance(value, str) and (name == "headers" or is_secret_name(name)):
        yield value
