"""The settings of one registration: checked like those of the file."""

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from headrace.config.explain import explain
from headrace.config.known_secrets import MASK
from headrace.config.registrations import RegistrationConfig, RegistrationsConfig
from headrace.config.yaml_tree import KeyPath, Problems
from headrace.errors import InvalidRequest

_MAX_DEPTH = 20
_MAX_PROBLEMS = 20
_MAX_BYTES = 65_536


def check_size(size_bytes: int) -> None:
    """Raise InvalidRequest if a registration of this size is too large to be decoded."""
    if size_bytes > _MAX_BYTES:
        raise InvalidRequest(f"the registration has {size_bytes} bytes; the limit is {_MAX_BYTES}: send less")


def read_registration(settings: object, allowed: RegistrationsConfig, shared: Mapping[str, Any]) -> RegistrationConfig:
    """Return the settings of a registration, which are those below a consumer's name in a file.

    Raises:
        InvalidRequest: Every problem, with the name of its setting.
    """
    problems, broken = Problems(), set[KeyPath]()
    if not isinstance(settings, dict):
        raise InvalidRequest("the body is not a JSON object: send the settings below a consumer's name in a file")
    check_size(len(msgspec.json.encode(settings)))
    _refuse_references(settings, (), problems, broken)
    try:
        found = RegistrationConfig.model_validate(settings, context={"registrations": allowed})
        found.consumer.client_properties(shared)
    except ValidationError as cause:
        errors = cause.errors(include_url=False, include_input=False)
        explain(errors[:_MAX_PROBLEMS], settings, problems, broken, RegistrationConfig)
    except ValueError as cause:
        problems.add("", ("consumer",), str(cause))
    if problems.found:
        raise InvalidRequest("; ".join(problems.found[:_MAX_PROBLEMS]))
    return found


def _refuse_references(value: Any, at: KeyPath, problems: Problems, broken: set[KeyPath]) -> None:
    """Reject references, which only files may have, and the mask that responses show instead of a secret."""
    if len(at) > _MAX_DEPTH:
        raise InvalidRequest("the settings are nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_references(item, (*at, key), problems, broken)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_references(item, (*at, index), problems, broken)
    elif isinstance(value, str) and ("${" in value or MASK in value) and len(problems.found) < _MAX_PROBLEMS:
        broken.add(at)
        text = "has ${, but registrations must not refer to variables and files of the machine: write the value itself"
        mask_text = "is the mask that responses show instead of a secret: write the secret itself"
        problems.add("", at, mask_text if MASK in value else text)
