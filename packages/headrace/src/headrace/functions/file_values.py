"""The values of a function file: durations and sizes as Nuclio writes them, and what all its models share."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from headrace.config.section import Number

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_WHOLE = re.compile(rf"([+-]?)(0|(?:{_PART})+)", re.ASCII)
_CAMEL = {"explicitonly": "explicitOnly", "deadletter": "deadLetter", "warn": "warning"}
"""Words that are not in lower case, or have a second name."""


def parse_duration(text: str) -> float:
    """Return the seconds of a duration as Go writes it: `10s`, `1m30s`, `250ms`.

    Raises:
        ValueError: The text is not a duration, such as a bare number other than 0.

    Source: Go's time.ParseDuration.
    """
    whole = _WHOLE.fullmatch(text)
    if not whole:
        raise ValueError(f"{text!r} is not a valid duration: write a number with a unit, such as 10s, 1m30s or 250ms")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, whole[2]))
    return -seconds if whole[1] == "-" else seconds


def parse_size(value: Any) -> Any:
    """Return the bytes of a size as Kubernetes writes it: `512Mi`, `1G`, or a number of bytes.

    Raises:
        ValueError: The text is not a size.
    """
    whole = re.fullmatch(r"(\d+)([KMGT]i?|k)?", str(value))
    if not whole:
        raise ValueError(
            f"is {value!r}, which is not a valid size: write bytes, or a number with a unit such as 512Mi or 1Gi"
        )
    unit = whole[2] or ""
    return int(whole[1]) * (1024 if unit.endswith("i") else 1000) ** ("KMGT".find(unit[:1].upper()) + 1 if unit else 0)


def _any_case(value: Any) -> Any:
    return _CAMEL.get(value.lower(), value.lower()) if isinstance(value, str) else value


def is_list(value: Any) -> Any:
    """Return a value that may be a list.

    Raises:
        ValueError: It is the text of a single item.
    """
    if isinstance(value, str):
        raise ValueError(f"is the text {value!r}: write a list, such as [{value}]")
    return value


Duration = BeforeValidator(lambda value: parse_duration(str(value)))
AnyCase = BeforeValidator(_any_case)
Workers = Annotated[int, Field(ge=0, le=1000), Number]
Whole = Annotated[int, Field(ge=0), Number]
Pause = Annotated[float, Field(ge=0), Duration]
Limit = Annotated[float, Field(gt=0), Duration]


class FilePart(BaseModel):
    """Part of the file; fields are found by the file's own names."""

    model_config = ConfigDict(
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,  # it may be a secret
    )
