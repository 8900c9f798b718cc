"""From a condition in SQL to functions that evaluate it: what it may contain, and what each part means.

A part returns None for NULL, and AND, OR and NOT follow SQL's logic of three values.
"""

import operator
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import sqlglot
from sqlglot import expressions as exp

from headrace.errors import StatementRejected

Read = Callable[[Any], Any]
_KINDS: Final = {str: "text", int: "number", float: "number", bool: "boolean", list: "list", dict: "object"}
_COMPARED: Final = ("text", "number", "boolean")
_OPERATORS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
}
_ARITHMETIC: Final[dict[type, Callable[[Any, Any], Any]]] = {
    exp.Add: operator.add,
    exp.Sub: operator.sub,
    exp.Mul: operator.mul,
    exp.Div: lambda left, right: left / right if right else None,
}
_OF_TEXT: Final[dict[type, tuple[str, Callable[..., Any]]]] = {
    exp.Lower: ("text", str.lower),
    exp.Upper: ("text", str.upper),
    exp.Trim: ("text", lambda text: text.strip(" ")),
    exp.Length: ("number", len),
    exp.StartsWith: ("boolean", str.startswith),
    exp.EndsWith: ("boolean", str.endswith),
    exp.Contains: ("boolean", operator.contains),
}
_CASTS: Final = {
    **dict.fromkeys(("TINYINT", "SMALLINT", "INT", "BIGINT"), "integer"),
    **dict.fromkeys(("FLOAT", "DOUBLE"), "number"),
    **dict.fromkeys(("TEXT", "VARCHAR"), "text"),
    "BOOLEAN": "boolean",
}
_ARGUMENTS: Final = frozenset(("this", "expression", "expressions", "low", "high", "to", "table", "db", "catalog"))
_ALSO: Final = frozenset(("negate", "typed", "safe", "is_string", "quoted", "nested", "kind"))
"""Arguments of a syntax tree that are read, or that change nothing here; any other one is refused."""
_KNOWN: Final = (
    "use AND, OR, NOT, comparisons, BETWEEN, IN, LIKE, ILIKE, IS NULL, + - * /, CAST and TRY_CAST to BIGINT, DOUBLE, "
    "VARCHAR or BOOLEAN, and lower, upper, trim, length, abs, coalesce, starts_with, ends_with, contains"
)
_COLUMNS: Final = (
    "key, value, headers['name'], topic, partition, offset and timestamp; a field of the value is value.name"
)


class Undecided(Exception):
    """A condition cannot be decided for a record."""

    def __init__(self, error: str, reason: str) -> None:
        """Take the class of the failure, and why."""
        super().__init__(reason)
        self.error, self.reason = error, reason


class Part(NamedTuple):
    """A part of a condition."""

    kind: str
    """`text`, `number`, `boolean` or `time`; `any` if only a record shows it, `null` for NULL."""
    read: Read
    """Returns its value for a record."""
    constant: Any = None
    """Its value, if no record changes it."""


class ConditionTree:
    """A condition whose parts are functions."""

    def __init__(self, text: str) -> None:
        """Read a condition.

        Raises:
            StatementRejected: It is not valid.
        """
        self.fields: list[str] = []
        """Names of the fields of values that are read."""
        self.reads_value = False
        try:
            tree = sqlglot.parse_one(text, read="duckdb")
            part = self._boolean(tree)
        except sqlglot.errors.SqlglotError as cause:
            found = cause.errors[0] if isinstance(cause, sqlglot.errors.ParseError) and cause.errors else {}
            near = f" at {found['highlight']!r}" if found.get("highlight") else ""
            raise StatementRejected(f"the condition is not valid SQL{near}: write it as value.amount > 100") from None
        except RecursionError:
            raise StatementRejected("the condition is nested too deeply: write fewer parentheses") from None
        self.is_met = part.read

    # Parts -----------------------------------------------------------------------------------------------------------

    def _part(self, node: Any) -> Part:
        if node.args.get("negate"):
            node.set("negate", None)
            return _not(self._part(node))
        if other := next((name for name, value in node.args.items() if value and name not in _ARGUMENTS | _ALSO), ""):
            raise _refused(node, f"{other} is not supported")
        make: Callable[[Any], Part] | None = getattr(self, f"_sql_{type(node).__name__.lower()}", None)
        if make:
            return make(node)
        if type(node) in _OPERATORS:
            return self._comparison(_OPERATORS[type(node)], node, node.this, node.expression)
        if type(node) in _ARITHMETIC:
            return _calculated(_ARITHMETIC[type(node)], self._number(node.this), self._number(node.expression))
        if type(node) in _OF_TEXT:
            return self._of_text(node)
        raise _refused(node)

    def _boolean(self, node: Any) -> Part:
        return _of_kind("boolean", self._part(node), node)

    def _number(self, node: Any) -> Part:
        return _of_kind("number", self._part(node), node)

    def _sql_paren(self, node: exp.Paren) -> Part:
        return self._part(node.this)

    def _sql_null(self, _: exp.Null) -> Part:
        return Part("null", lambda _: None)

    def _sql_literal(self, node: exp.Literal) -> Part:
        text = node.this
        value = text if node.is_string else int(text) if text.isdecimal() else float(text)
        return _constant(value)

    def _sql_neg(self, node: exp.Neg) -> Part:
        part = self._number(node.this)
        return _constant(-part.constant) if part.constant is not None else _each("number", operator.neg, part)

    # Columns ---------------------------------------------------------------------------------------------------------

    def _sql_column(self, node: exp.Column) -> Part:
        return self._path([part.name for part in node.parts], node)

    def _sql_dot(self, node: exp.Dot) -> Part:
        return self._path([part.name for part in node.parts], node)

    def _path(self, names: Sequence[str], node: Any) -> Part:
        column, below = names[0].lower(), names[1:]
        if column == "value" and below:
            return self._field(*below)
        if below or column not in ("key", "value", "topic", "partition", "offset", "timestamp"):
            raise _refused(node, f"is not a column: the columns are {_COLUMNS}")
        if column in ("key", "value"):
            self.reads_value |= column == "value"
            at = 2 if column == "key" else 3
            return Part("text", lambda record: _text(record.row[at], column))
        if column == "topic":
            return Part("text", lambda record: record.topic)
        if column == "timestamp":
            return Part("time", lambda record: record.row[1] if record.row[1] >= 0 else None)
        return Part("number", (lambda record: record.row[0]) if column == "offset" else lambda record: record.partition)

    def _field(self, name: str, *below: str) -> Part:
        self.reads_value = True
        if name not in self.fields:
            self.fields.append(name)
        first = operator.attrgetter(f"fields.f{self.fields.index(name)}")
        if not below:
            return Part("any", first)

        def read(record: Any) -> Any:
            value = first(record)
            for inner in below:
                value = value.get(inner) if type(value) is dict else None
            return value

        return Part("any", read)

    def _sql_bracket(self, node: exp.Bracket) -> Part:
        index = node.expressions[0] if len(node.expressions) == 1 else None
        is_header = isinstance(node.this, exp.Column) and [p.name.lower() for p in node.this.parts] == ["headers"]
        if not is_header or not isinstance(index, exp.Literal) or not index.is_string:
            raise _refused(node, "only headers['name'] has brackets")
        name = index.this

        def read(record: Any) -> Any:
            return next((_text(value, "header") for key, value in reversed(record.row[4] or ()) if key == name), None)

        return Part("text", read)

    # Logic -----------------------------------------------------------------------------------------------------------

    def _sql_and(self, node: exp.And) -> Part:
        return _joined([self._boolean(one) for one in node.flatten()], ends=False)

    def _sql_or(self, node: exp.Or) -> Part:
        return _joined([self._boolean(one) for one in node.flatten()], ends=True)

    def _sql_not(self, node: exp.Not) -> Part:
        return _not(self._boolean(node.this))

    def _sql_is(self, node: exp.Is) -> Part:
        part, right = self._part(node.this), node.expression
        if isinstance(right, exp.Null):
            return Part("boolean", lambda record: part.read(record) is None)
        if not isinstance(right, exp.Boolean):
            raise _refused(node)
        read, truth = _of_kind("boolean", part, node.this).read, bool(right.this)
        return Part("boolean", lambda record: read(record) is truth)

    def _sql_boolean(self, node: exp.Boolean) -> Part:
        return _constant(bool(node.this))

    # Comparisons -----------------------------------------------------------------------------------------------------

    def _comparison(self, compare: Callable[[Any, Any], Any], node: Any, left_node: Any, right_node: Any) -> Part:
        left, right = self._part(left_node), self._part(right_node)
        if left.kind == "time" or right.kind == "time":
            left, right = _as_time(left, node), _as_time(right, node)
        elif len({left.kind, right.kind} - {"any", "null"}) > 1:
            raise _refused(node, f"{left.kind} is compared with {right.kind}: use CAST")
        return _compared(compare, left, right)

    def _sql_between(self, node: exp.Between) -> Part:
        low = self._comparison(operator.ge, node, node.this, node.args["low"])
        return _joined([low, self._comparison(operator.le, node, node.this, node.args["high"])], ends=False)

    def _sql_in(self, node: exp.In) -> Part:
        if not node.expressions:
            raise _refused(node)
        constants = [self._part(one).constant for one in node.expressions]
        kinds = {_kind_of(constant) for constant in constants}
        if len(kinds) == 1 and None not in constants and self._part(node.this).kind != "time":
            chosen = frozenset(constants)
            return self._comparison(lambda value, _: value in chosen, node, node.this, node.expressions[0])
        return _joined([self._comparison(operator.eq, node, node.this, one) for one in node.expressions], ends=True)

    def _sql_like(self, node: exp.Like) -> Part:
        return self._matching(node, str)

    def _sql_ilike(self, node: exp.ILike) -> Part:
        return self._matching(node, str.lower)

    def _matching(self, node: Any, folded: Callable[[str], str]) -> Part:
        pattern = self._part(node.expression)
        if pattern.kind != "text" or pattern.constant is None:
            raise _refused(node, "a pattern is a text in quotes")
        fits = _pattern(folded(pattern.constant))
        return _each("boolean", lambda text: fits(folded(text)), _of_kind("text", self._part(node.this), node.this))

    # Functions -------------------------------------------------------------------------------------------------------

    def _of_text(self, node: Any) -> Part:
        kind, function = _OF_TEXT[type(node)]
        nodes = [node.this, node.expression] if node.expression else [node.this]
        return _each(kind, function, *[_of_kind("text", self._part(one), one) for one in nodes])

    def _sql_abs(self, node: exp.Abs) -> Part:
        return _each("number", abs, self._number(node.this))

    def _sql_coalesce(self, node: exp.Coalesce) -> Part:
        parts = [self._part(one) for one in (node.this, *node.expressions)]
        kinds = {part.kind for part in parts} - {"null"}
        reads = [part.read for part in parts]

        def read(record: Any) -> Any:
            return next((value for one in reads if (value := one(record)) is not None), None)

        if "time" in kinds and len(kinds) > 1:
            raise _refused(node, "timestamp is mixed with other values")
        return Part(kinds.pop() if len(kinds) == 1 else "any", read)

    def _sql_trycast(self, node: exp.TryCast) -> Part:
        return self._sql_cast(node, is_try=True)

    def _sql_cast(self, node: Any, *, is_try: bool = False) -> Part:
        to, part = node.to.this.name, self._part(node.this)
        if to in ("TIMESTAMP", "TIMESTAMPTZ", "TIMESTAMPNTZ") and part.constant is not None:
            return _as_time(part, node)
        if to not in _CASTS or part.kind == "time":
            raise _refused(node)
        kind = _CASTS[to]

        def convert(value: Any) -> Any:
            try:
                return _converted(value, kind)
            except (ValueError, OverflowError):
                if is_try:
                    return None
                raise Undecided("StatementRejected", f"{_kind_of(value)} cannot become {kind}; see TRY_CAST") from None

        return _each("number" if kind == "integer" else kind, convert, part)


def _refused(node: Any, why: str = "") -> StatementRejected:
    text = node.sql("duckdb")[:60]
    return StatementRejected(f"{text!r} {why}" if why else f"{text!r} is not supported here: {_KNOWN}")


def _constant(value: Any) -> Part:
    return Part(_KINDS[type(value)], lambda _: value, value)


def _kind_of(value: Any) -> str:
    return _KINDS.get(type(value), "value")


def _text(data: bytes | None, what: str) -> str | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        raise Undecided("DecodeError", f"the {what} is not UTF-8") from None


def _of_kind(kind: str, part: Part, node: Any) -> Part:
    """Return a part that is of a kind or NULL; another value of a record is undecided."""
    if part.kind in (kind, "null"):
        return part
    if part.kind != "any":
        raise _refused(node, f"is {part.kind}, where a {kind} is needed")
    read = part.read

    def checked(record: Any) -> Any:
        value = read(record)
        if value is None or _KINDS[value.__class__] == kind:
            return value
        raise Undecided("StatementRejected", f"a field is {_kind_of(value)}, where a {kind} is needed")

    return Part(kind, checked)


def _each(kind: str, function: Callable[..., Any], *parts: Part) -> Part:
    """Return what a function makes of parts; NULL if one of them is."""
    if len(parts) == 1:
        only = parts[0].read
        return Part(kind, lambda record: None if (value := only(record)) is None else function(value))
    reads = [part.read for part in parts]

    def read(record: Any) -> Any:
        values = [one(record) for one in reads]
        return None if None in values else function(*values)

    return Part(kind, read)


def _calculated(function: Callable[[Any, Any], Any], left: Part, right: Part) -> Part:
    def calculate(first: Any, second: Any) -> Any:
        try:
            return function(first, second)
        except ArithmeticError as cause:
            raise Undecided("StatementRejected", f"{cause}") from None

    return _each("number", calculate, left, right)


def _not(part: Part) -> Part:
    return _each("boolean", operator.not_, part)


def _joined(parts: Sequence[Part], *, ends: bool) -> Part:
    """Return AND or OR of parts: the first value that `ends` it counts, and later parts are not evaluated."""
    reads = [part.read for part in parts]

    def read(record: Any) -> Any:
        result: bool | None = not ends
        for one in reads:
            value = one(record)
            if value is ends:
                return ends
            if value is None:
                result = None
        return result

    return Part("boolean", read)


def _compared(compare: Callable[[Any, Any], Any], left: Part, right: Part) -> Part:
    first, second, constant = left.read, right.read, right.constant
    if left.kind == right.kind and left.kind != "any":
        if constant is not None:
            return _each("boolean", lambda value: compare(value, constant), left)
        return _each("boolean", compare, left, right)

    def read(record: Any) -> Any:
        value, other = first(record), constant
        if other is None:
            other = second(record)
        if value is None or other is None:
            return None
        kind = _KINDS[value.__class__]
        if kind != _KINDS[other.__class__] or kind not in _COMPARED:
            raise Undecided("StatementRejected", f"{kind} is compared with {_kind_of(other)}; see TRY_CAST")
        return compare(value, other)

    return Part("boolean", read)


def _as_time(part: Part, node: Any) -> Part:
    if part.kind in ("time", "null"):
        return part
    if part.kind == "text" and part.constant is not None:
        try:
            time = datetime.fromisoformat(part.constant)
        except ValueError:
            raise _refused(node, f"{part.constant!r} is not a time: write 2026-01-31T08:00:00Z") from None
        milliseconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000
        return Part("time", lambda _: milliseconds, milliseconds)
    raise _refused(node, "timestamp is compared with a time in quotes, such as '2026-01-31T08:00:00Z'")


def _converted(value: Any, kind: str) -> Any:
    found = _kind_of(value)
    if found in ("list", "object"):
        raise ValueError(kind)
    if kind == "text":
        return value if found == "text" else str(value).lower() if found == "boolean" else str(value)
    if kind == "boolean":
        if found == "text":
            return {"true": True, "false": False}[value.lower()] if value.lower() in ("true", "false") else _no(kind)
        return bool(value)
    if found == "text" and not re.fullmatch(
        r"\s*[+-]?(\d{1,300}\.?\d{0,300}|\.\d{1,300})([eE][+-]?\d{1,3})?\s*", value, re.A
    ):
        raise ValueError(kind)
    if kind == "number":
        return float(value)
    return int(value) if found != "text" or value.strip().lstrip("+-").isdecimal() else round(float(value))


def _no(kind: str) -> Any:
    raise ValueError(kind)


def _pattern(pattern: str) -> Callable[[str], bool]:
    """Return whether a text fits a pattern of LIKE, in a time that no pattern can make long."""
    first, *others = [
        re.compile("".join("." if sign == "_" else re.escape(sign) for sign in part), re.S)
        for part in pattern.split("%")
    ]
    if not others:
        return lambda text: first.fullmatch(text) is not None
    *middle, last = others
    width = len(pattern.rsplit("%", 1)[1])

    def fits(text: str) -> bool:
        begin = first.match(text)
        if not begin:
            return False
        at = begin.end()
        for part in middle:
            found = part.search(text, at)
            if not found:
                return False
            at = found.end()
        return len(text) - width >= at and last.fullmatch(text, len(text) - width) is not None

    return fits
