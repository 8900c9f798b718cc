"""light-4j's placeholders, `${key:default}`, and the values that replace them.

Source: `ConfigInjection` of light-4j.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from headrace.config.references import is_secret_name
from headrace.config.written_file import variable_of
from headrace.config.yaml_tree import Problems, read_tree

_PLACEHOLDER: Final = re.compile(r"\$\{(.*?)\}", re.DOTALL)
_TRUE: Final = frozenset(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"))
_FALSE: Final = frozenset(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"))
_ENCRYPTED: Final = "CRYPT"


class Setting(NamedTuple):
    """A value of the folder or of the environment."""

    value: Any
    """As in YAML."""
    location: str
    """File and line, or the variable."""
    key: str
    """As it is written there; empty for a variable."""
    written: bool = True
    """Whether the user wrote it; otherwise it is a default, also one of a placeholder."""
    packaged: bool = False
    """Whether it is in no file of the folder: it is light4j's own default."""
    secret: str = ""
    """The file that holds it in plain text, if it is a secret."""

    @property
    def label(self) -> str:
        """Location and key, for problems."""
        return f"{self.location}: {self.key}" if self.key else self.location

    @property
    def is_on(self) -> bool:
        """Whether it is true, also as the text of a variable."""
        return self.value is True or (isinstance(self.value, str) and typed(self.value) is True)


class PlaceholderProblem(Exception):
    """A placeholder has no value; the text has the reason, and never a value."""


class Placeholders:
    """Replaces placeholders by the values of `values.yml` and of the environment."""

    def __init__(self, values: Mapping[str, Setting], environ: Mapping[str, str], *, allow_empty: bool) -> None:
        """Take the values, and whether an empty default is a value.

        Raises:
            PlaceholderProblem: The variable `injection_order` is not valid.
        """
        self._values, self._environ, self._allow_empty = values, environ, allow_empty
        self._order = environ.get("injection_order", "2")
        self.used: set[str] = set()
        """Keys of `values.yml` that a placeholder names."""
        if self._order not in ("0", "1", "2"):
            raise PlaceholderProblem(
                "is not an order: write 0 for values.yml alone, 1 if it overrides the environment, 2 for the opposite"
            )

    def replaced(self, found: Setting) -> Setting:
        """Return a setting with its placeholders replaced; a text that is one placeholder gets a value of any type.

        Raises:
            PlaceholderProblem: A placeholder has no value, or is malformed.
        """
        text = found.value
        if isinstance(text, list):
            return found._replace(value=[self.replaced(found._replace(value=item)).value for item in text])
        if isinstance(text, dict):
            return found._replace(value={k: self.replaced(found._replace(value=v)).value for k, v in text.items()})
        if not isinstance(text, str):
            return found
        refuse_encrypted(text, found.key)
        if "${" not in text:
            is_secret = found.written and (is_secret_name(found.key) or found.key.endswith("auth.user.info"))
            return found._replace(secret=found.location if is_secret else "")
        if "${" in text.rpartition("}")[2] or "${" in _PLACEHOLDER.sub("", text):  # the first is quick for any text
            raise PlaceholderProblem("has ${ without }: add it")
        parts = [self._value(match[1], found) for match in _PLACEHOLDER.finditer(text)]
        if (match := _PLACEHOLDER.match(text)) and match[0] == text:
            return parts[0]
        values = iter(parts)
        return found._replace(
            value=_PLACEHOLDER.sub(lambda _: _text(next(values).value), text),
            written=found.written or any(part.written for part in parts),
            secret=next((part.secret for part in parts if part.secret), ""),
        )

    def given(self, key: str) -> Setting | None:
        """Return what the environment and `values.yml` have for a key, the stronger of them.

        Raises:
            PlaceholderProblem: The variable is encrypted.
        """
        value, variable, from_environment = self._values.get(key), variable_of(key), None
        if self._order != "0" and variable in self._environ:
            refuse_encrypted(self._environ[variable], key)
            from_environment = Setting(self._environ[variable], variable, "")
        return value or from_environment if self._order == "1" else from_environment or value

    def _value(self, content: str, found: Setting) -> Setting:
        key, colon, default = (part.strip() for part in content.partition(":"))
        if not key or "${" in content:
            raise PlaceholderProblem("has a malformed placeholder: write ${key:default}, without another one inside")
        self.used.add(key)
        if chosen := self.given(key):
            return chosen
        if colon and default.startswith("?"):
            raise PlaceholderProblem(f"has no value: {default[1:].strip() or f'set {key}'}")
        if default == "$":
            return found._replace(value="${" + key + "}")
        if not default and not (colon and self._allow_empty):
            raise PlaceholderProblem(
                f"needs {key}, which has no value: set it in values.yml, or the variable {variable_of(key)}"
            )
        return found._replace(value=typed(default) if default else None, written=False)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def refuse_encrypted(text: str, key: str) -> None:
    """Raise PlaceholderProblem if a text is encrypted."""
    if text.strip().startswith(f"{_ENCRYPTED}:"):
        raise PlaceholderProblem(
            "is encrypted for a Java class that the folder names, which Headrace does not load: remove it, and give "
            f"the plain value in an environment variable such as {variable_of(key)}"
        )


def typed(text: str) -> Any:
    """Return a default with its type: a switch, a number, a list, else the text."""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    if text.startswith(("- ", "[", "{")):
        problems = Problems()
        value = read_tree(text, "default", problems)
        return text if problems.found else value
    return text
