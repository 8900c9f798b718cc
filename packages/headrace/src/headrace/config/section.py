"""The base class of every section of `headrace.yaml`, and the types of its values, such as patterns of topics.

Durations are seconds, sizes are bytes or records, as the names say. Every model is frozen and rejects unknown keys.
"""

import ast
import functools
import inspect
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic_core import CoreSchema, SchemaError, SchemaValidator, core_schema

from headrace.config.format_list import FORMATS, SCHEMA_TYPES


def _no_switch(value: object) -> object:
    if isinstance(value, bool):  # YAML's yes, no, on, off; they would pass as 1 and 0
        raise ValueError("should be a number, not true or false")
    return value


def _plain_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        # Parsers disagree on blanks, backslashes and characters beyond ASCII.
        plain = re.fullmatch(r"[!-\[\]-~]+", value)
        usable = plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # the resolver rejects empty and long labels
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("should be a URL such as http://localhost:8081")
    if "@" in parts.netloc:
        raise ValueError("has a user or password, and URLs are logged: remove them, and use the settings for logins")
    return value


def _not_dots(name: str) -> str:
    if name in (".", ".."):
        raise ValueError(f"is {name!r}, which is not a valid topic name")
    return name


Number = BeforeValidator(_no_switch)
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

if TYPE_CHECKING:
    FormatName = str
    PlainFormatName = str
else:
    FormatName = Literal[tuple(FORMATS)]
    PlainFormatName = Literal[tuple(name for name in FORMATS if name not in SCHEMA_TYPES)]


class Section(BaseModel):
    """Base of every model of the file."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,
        hide_input_in_errors=True,  # it may hold secrets
    )

    internal: ClassVar[frozenset[str]] = frozenset()
    """Fields that are constants for users: code and tests set them, and no file does."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe each setting by its docstring. The library would read the source of every model at import."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name in cls.internal:
            properties.pop(name, None)
        for model in reversed(cls.__mro__):
            for name, text in _docstrings(model) if issubclass(model, Section) else ():
                known = (name, cls.model_fields[name].alias) if name in cls.model_fields else ()
                for key in properties.keys() & known:
                    properties[key]["description"] = text
        return schema


def _docstrings(model: type) -> Iterator[tuple[str, str]]:
    """Yield each attribute with a docstring, and that; none of a model without source, which is composed."""
    try:
        source = inspect.getsource(model)
    except OSError:
        return
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for attribute, text in itertools.pairwise(definition.body):
        match attribute, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(found))):
                yield name, inspect.cleandoc(found)


def any_of(kinds: Mapping[str, type[Section]]) -> Any:
    """Return a union of sections by the key that only each has. A section without any of the keys is of the first kind.

    The tag of a section is its key in angle brackets, so that no key of a file is mistaken for it.
    """

    def tag_of(value: Any) -> str:
        names = value if isinstance(value, dict) else getattr(type(value), "model_fields", {})
        return f"<{next((key for key in kinds if key in names), next(iter(kinds)))}>"

    members = [Annotated[kind, Tag(f"<{key}>")] for key, kind in kinds.items()]
    return Annotated[functools.reduce(operator.or_, members), Discriminator(tag_of)]


_MAX_REPEATS: Final = 250
"""About the length of a topic's name."""
_COUNT: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_CLASSES: Final = {
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "d": "[0-9]",
    "D": "[^0-9]",
    "s": r"[\t-\r ]",
    "S": r"[^\t-\r ]",
}


def compile_pattern(text: str) -> Callable[[str], bool]:
    """Return a function that tests whether a whole name matches.

    Raises:
        ValueError: The text is not a valid pattern, or takes too much memory.
    """
    text = _ESCAPE.sub(_ascii, text)
    if math.prod(max(int(least), int(most or 0), 1) for least, most in _COUNT.findall(text)) > _MAX_REPEATS:
        raise ValueError(
            f"is not a valid pattern: repeats a part more than {_MAX_REPEATS} times. Write one such as metrics\\..*"
        )
    try:
        _engine(text)  # alone first: "a)|(b" is not valid
        return _engine(f"^(?:{text})$").isinstance_python
    except SchemaError as cause:
        why = str(cause).strip().splitlines()[-1].strip().removeprefix("error: ")
        raise ValueError(f"is not a valid pattern: {why}. Write one such as metrics\\..* (RE2 syntax)") from None


def _ascii(escape: re.Match[str]) -> str:
    """Return an escape in the alphabet of topic names; with all of Unicode a pattern takes 100 times as long."""
    if escape[1] in "pP":
        raise ValueError("is not a valid pattern: topic names are ASCII. Write [A-Za-z]+ or similar instead of \\p")
    return _CLASSES.get(escape[1], escape[0])


def fits_any(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tests whether a name matches one of these patterns."""
    fits = [compile_pattern(text) for text in patterns]
    return lambda name: any(fit(name) for fit in fits)


def _engine(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


def _checked(text: str) -> str:
    compile_pattern(text)
    return text


TopicPattern = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_checked)]
