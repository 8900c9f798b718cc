"""The compiled module that writes and reads Kafka's records without an object for each."""

import functools
import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import Final

from headrace.config.kafka import KafkaConfig

log = logging.getLogger(__name__)

_OLDEST, _NEWEST = 0x02_06_00_00, 0x03_00_00_00
"""Versions of librdkafka whose public interface is the one that the module was written for; the second is too new."""
_MODULE: Final = "headrace.kafka._columns"


def native_module(kafka: KafkaConfig) -> ModuleType | None:
    """Return the compiled module; None if the file says `off`, or if it is not usable here."""
    return _opened() if kafka.native == "auto" else None


@functools.cache
def _opened() -> ModuleType | None:
    try:
        module = importlib.import_module(_MODULE)
        version = module.open_library(_library())
    except (ImportError, OSError) as cause:
        log.info("records pass through Kafka's Python client, which is slower: %s", cause)
        return None
    if not _OLDEST <= version < _NEWEST:
        log.info("records pass through Kafka's Python client, which is slower: librdkafka has version %#x", version)
        return None
    return module


def _library() -> str:
    """Return the file of the librdkafka that Kafka's Python client uses in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split(maxsplit=5)[-1] for line in lines if "/librdkafka" in line}
    if len(found) != 1:
        raise ImportError(f"{len(found)} librdkafka are loaded")
    return found.pop()
