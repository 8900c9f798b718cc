"""The table of light-4j's keys: the setting that each becomes, or why it has no effect."""

import csv
import re
from pathlib import Path
from typing import Final, NamedTuple

from headrace.config.kafka import CONSUMER_KEYS, EVERY_CLIENT, PRODUCER_KEYS
from headrace.config.kafka_java import SECURITY_KEYS

_NOTHING: Final = "nothing: "
_REFUSED: Final = "refused: "
_PLAIN: Final = re.compile(r"`([a-z_]+\.[a-z_.]+)`")


class LightKey(NamedTuple):
    """A key of a file."""

    file: str
    """Name of the file without its ending."""
    key: str
    """Path of the key with dots; `*` stands for all keys without a row."""
    default: str
    """Default of light-4j, or the text with placeholders that its packaged file has."""
    applied: str
    """Whether the default holds for a folder without the key: `yes`, `login` if the folder sets any part of a login."""
    here: str
    """What holds for a folder without the key where that is not light-4j's default, in its unit; empty if it is."""
    becomes: str
    """Settings, separated by blanks; or `nothing: ` or `refused: ` with the reason.

    `reactive.`, `active.` and `query.` begin settings of these consumers.
    """
    how: str
    """Name of the conversion; `special` if the setting depends on other keys too."""

    @property
    def targets(self) -> list[str]:
        """The settings."""
        return [] if ": " in self.becomes else self.becomes.split()

    @property
    def why_nothing(self) -> str:
        """Why the key has no effect; empty if it has one."""
        return self.becomes.removeprefix(_NOTHING) if self.becomes.startswith(_NOTHING) else ""

    @property
    def why_refused(self) -> str:
        """Why the key is refused if it is on; empty otherwise."""
        return self.becomes.removeprefix(_REFUSED) if self.becomes.startswith(_REFUSED) else ""


with Path(__file__).with_name("keys.csv").open(newline="") as _file:
    ROWS: Final = [LightKey(**row) for row in csv.DictReader(_file)]
"""All rows, in the order of the page."""
_ROWS: Final = {(row.file, row.key): row for row in ROWS}
OTHER_NAMES: Final = {"openapi-security": "security"}
"""Files with the keys of another one."""
FILES: Final = [*dict.fromkeys(row.file for row in ROWS), *OTHER_NAMES, "values"]
"""Names of the files, without their ending."""


def rows_of(file: str) -> list[LightKey]:
    """Return the rows of a file."""
    return [row for row in ROWS if row.file == OTHER_NAMES.get(file, file)]


def keys_of(file: str) -> list[str]:
    """Return the known keys of a file."""
    return [row.key for row in rows_of(file) if row.key != "*"]


def row_of(file: str, key: str) -> LightKey | None:
    """Return the row of a key; None if it is not known.

    Framework files nest their keys differently in each version, so there the end of a path is enough.
    """
    if found := _ROWS.get((file, key)):
        return found
    if file.startswith("kafka-"):
        key = f"properties.{key}" if key.startswith("sasl.jaas.config.") else key  # some versions have it at the top
        section, _, name = key.partition(".")
        if section in ("properties", "additionalKafkaProperties") and name:
            return _ROWS.get((file, f"properties.{name}")) or _ROWS.get((file, "*")) or _property(file, key, name)
        return _ROWS.get((file, "*"))
    parts = key.split(".")
    paths = (".".join(parts[first:end]) for end in range(len(parts), 0, -1) for first in range(end))
    return next((_ROWS[file, path] for path in paths if (file, path) in _ROWS), None) or _ROWS.get((file, "*"))


def _property(file: str, key: str, name: str) -> LightKey:
    """Return the row of a property of Kafka's client. The loader checks the name."""
    is_producer = file == "kafka-producer"
    keys = PRODUCER_KEYS if is_producer else CONSUMER_KEYS
    setting = keys[name].setting.replace("`", "") if name in keys else ""
    if name in SECURITY_KEYS or name in EVERY_CLIENT:
        setting = f"kafka.properties.{name}"
    elif not setting.startswith(_NOTHING) and not (name in keys and _PLAIN.fullmatch(keys[name].setting)):
        setting = f"{'producer' if is_producer else 'consumer'}.properties.{name}"
    if setting.startswith("consumer."):  # instances of active consumers must not share an identity
        setting = f"reactive.{setting}" + (f" active.{setting}" if name != "group.instance.id" else "")
    return LightKey(file, key, "", "", "", setting, "path" if name.endswith(".location") else "")
