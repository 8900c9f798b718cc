"""What every section of `headrace.yaml` is made of: its base class, and the kinds of values.

Durations are seconds, sizes are bytes or records, as the names say. Every model is frozen and refuses unknown keys.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _no_switch(value: object) -> object:
    if isinstance(value, bool):  # YAML's yes, no, on, off; they would pass as 1 and 0
        raise ValueError("should be a number, not true or false")
    return value


def _plain_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        # Blanks, backslashes and letters beyond ASCII are read in different ways by different readers.
        plain = re.fullmatch(r"[!-\[\]-~]+", value)
        usable = plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # what looks names up takes no empty and no long labels
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("should be a URL such as http://localhost:8081")
    if "@" in parts.netloc:
        raise ValueError("holds a user or password, which URLs spread into logs: set them apart from the URL")
    return value


def _not_dots(name: str) -> str:
    if name in (".", ".."):
        raise ValueError(f"is {name!r}, which Kafka takes for no topic")
    return name


Number = BeforeValidator(_no_switch)
FormatName = Literal["binary", "string", "json", "avro", "jsonschema", "protobuf"]
Port = Annotated[int, Field(ge=0, le=65535), Number]
Seconds = Annotated[float, Field(ge=0), Number]
PositiveSeconds = Annotated[float, Field(gt=0), Number]
Count = Annotated[int, Field(ge=1), Number]
Url = Annotated[str, AfterValidator(_plain_url)]
NotDots = AfterValidator(_not_dots)
TopicName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$"), NotDots]
GroupName = Annotated[
    str, Field(pattern=r"^[^\^\s\x00-\x1f\x7f]([^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f])?$", max_length=255)
]


class Section(BaseModel):
    """Base of every model of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
