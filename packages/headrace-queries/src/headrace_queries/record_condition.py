"""Which records meet the condition `where` of a consumer, and which it cannot judge. No database is needed."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.delivery.outcomes import FILTERED, Delivery, Reply
from headrace.errors import StatementRejected
from headrace.records import RecordBatch, Row
from headrace_queries.condition_tree import ConditionTree, Undecided

_NO_ROW: Final[Row] = (0, 0, None, None, None, 0)


class CurrentRecord:
    """The record that is judged now; its parts are decoded when the condition first reads them."""

    __slots__ = ("_decode", "_fields", "_nothing", "partition", "row", "topic")

    def __init__(self, names: list[str]) -> None:
        """Take the names of the fields of values that are read; the others are skipped while a value is decoded."""
        fields = [(f"f{at}", Any, None) for at in range(len(names))]
        form = msgspec.defstruct("Fields", fields, rename={f"f{at}": name for at, name in enumerate(names)}, gc=False)
        self._decode = msgspec.json.Decoder(form).decode
        self._nothing = form()
        self._fields: Any = None
        self.topic, self.partition, self.row = "", 0, _NO_ROW

    def begin(self, row: Row) -> None:
        self.row = row
        self._fields = None

    @property
    def fields(self) -> Any:
        """The fields of the value; each is null where the value is null, or not an object."""
        if self._fields is None:
            value = self.row[3]
            self._fields = self._nothing if value is None else self._decoded(value)
        return self._fields

    def _decoded(self, value: bytes) -> Any:
        try:
            return self._decode(value)
        except msgspec.ValidationError:
            return self._nothing  # JSON, but not an object
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise Undecided("DecodeError", f"the value is not JSON: {cause}") from None


class RecordCondition:
    """A condition in SQL over one record; a check of deliveries."""

    def __init__(self, text: str) -> None:
        """Read a condition.

        Raises:
            StatementRejected: It is not valid, or needs more than this evaluation has.
        """
        tree = ConditionTree(text)
        self.reads_value = tree.reads_value
        """Whether it reads the value of records."""
        self._is_met = tree.is_met
        self._record = CurrentRecord(tree.fields)
        try:
            self._judge(_NO_ROW)
        except RecursionError:
            raise StatementRejected("the condition is nested too deeply: write fewer parentheses") from None

    def __call__(self, delivery: Delivery, records: RecordBatch) -> Mapping[int, Reply]:
        """Return the replies for the records that are not delivered: filtered, or failed for good."""
        record, judge = self._record, self._judge
        record.topic, record.partition = records.topic_partition
        rows = [records.row] if len(records) == 1 else records.rows()
        return {index: reply for index, row in enumerate(rows) if (reply := judge(row))}

    def _judge(self, row: Row) -> Reply | None:
        self._record.begin(row)
        try:
            return None if self._is_met(self._record) is True else FILTERED
        except Undecided as cause:
            return Reply(cause.error, cause.reason, reached=False, permanent=True)
