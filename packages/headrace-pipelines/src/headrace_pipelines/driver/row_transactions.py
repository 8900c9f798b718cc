"""Exactly once in real-time mode: rows carry the position of their record, and are written in one transaction with it.

A micro-batch of real-time mode that is repeated has other rows, so its number says nothing. The position does: it is
the offset of the group `headrace.<pipeline>.<flow>.<query>` on the source's partition. `TransactionWriter.java` runs in
the tasks. Here the rows get their positions, and the driver keeps a sign that the group has not expired.
"""

from __future__ import annotations

import functools
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from headrace.errors import EnvironmentProblem, HeadraceError, PipelineInvalid
from headrace_pipelines.driver.exactly_once_sink import REAL_TIME

_POSITION = ("topic", "partition", "offset")
_SOURCE = Path(__file__).with_name("TransactionWriter.java")
_CLASS = "headrace.TransactionWriter"
_JAVA_LEVEL = 8  # the highest of which Spark's compiler knows all that the source uses
_LINGER_MS = 5
_TRANSACTIONS_LEVEL = 2
_PASSES = ("Project", "Filter", "CollectMetrics", "SubqueryAlias", "Generate")
_USE_INTERVAL = "use trigger.interval_seconds, or delivery: at_least_once"


def with_positions(records: DataFrame) -> DataFrame:
    """Return rows with the positions of the records that they are made of, as three more columns.

    Raises:
        PipelineInvalid: A row has no one position, or a repeated record could give other rows.
    """
    spark: Any = records.sparkSession
    catalyst, analyzed = spark._jvm.org.apache.spark.sql.catalyst, records._jdf.queryExecution().analyzed()
    carrying = _Carrying(catalyst)
    plan, position = carrying.through(catalyst.optimizer.InlineCTE(True, True).apply(analyzed))
    plan = catalyst.plans.logical.Project(analyzed.output().appendedAll(position), plan)
    rows = spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, plan)
    return DataFrame(rows, spark).toDF(*records.columns, *(f"source_{name}" for name in _POSITION))


class _Carrying:
    """Adds the position to the operators of a plan of Spark, from the sources upwards."""

    def __init__(self, catalyst: Any) -> None:
        self._plans = catalyst.plans.logical
        self._current = catalyst.trees.TreePattern.CURRENT_LIKE()
        self._topics = set[str]()
        self._makes_several = False
        """Whether a record may have several rows, so that a repeat must make the same ones."""

    def through(self, node: Any) -> tuple[Any, Any]:
        """Return a node with the position among its columns, and the three columns."""
        name = str(node.getClass().getSimpleName())
        if name == "StreamingRelationV2":
            self._check_source(node.extraOptions())
            return node, _chosen(node.output(), _POSITION)
        if name == "View":
            return self.through(node.child())
        if name == "Union":
            parts = [self.through(node.children().apply(number)) for number in range(node.children().size())]
            of = [node.children().apply(number).output() for number in range(len(parts))]
            children = [
                self._plans.Project(own.appendedAll(at), below) for own, (below, at) in zip(of, parts, strict=True)
            ]
            union = node.withNewChildren(_sequence(node.children(), children))
            return union, union.output().takeRight(len(_POSITION))
        if name not in _PASSES:
            raise PipelineInvalid(f"exactly once in real-time mode does not have {name}: {_USE_INTERVAL}")
        child, position = self.through(node.child())
        self._makes_several |= name == "Generate"
        by_luck = not node.deterministic() or node.containsPattern(self._current)
        if self._makes_several and name in ("Generate", "Filter") and by_luck:
            raise PipelineInvalid(
                "exactly once in real-time mode gives each record the same rows again, and this flow makes several "
                f"rows of a record by chance or by the time: {_USE_INTERVAL}"
            )
        if name == "Project":
            return self._plans.Project(node.projectList().appendedAll(position), child), position
        return node.withNewChildren(_sequence(node.children(), [child])), position

    def _check_source(self, options: Mapping[str, str]) -> None:
        topic, isolation = options.get("subscribe"), options.get("kafka.isolation.level")
        if topic in self._topics:
            text = f"exactly once in real-time mode reads a topic once in a flow, and this one reads {topic} twice"
            raise PipelineInvalid(f"{text}: write two flows, or {_USE_INTERVAL}")
        if not topic or isolation != "read_committed":
            text = "exactly once in real-time mode reads a topic at read_committed"
            raise PipelineInvalid(f"{text}: remove subscribePattern, assign and kafka.isolation.level from options")
        self._topics.add(str(topic))


def _chosen(output: Any, names: tuple[str, ...]) -> Any:
    found = {output.apply(number).name(): output.apply(number) for number in range(output.size())}
    return _sequence(output, [found[name] for name in names])


def _sequence(like: Any, items: list[Any]) -> Any:
    """Return a sequence of Scala."""
    made = like.take(0)
    for item in items:
        made = made.appended(item)
    return made


class RowTransactions:
    """Starts the writer of one flow, and keeps a sign in its group as long as micro-batches complete.

    A group without the sign has expired, or the checkpoint is of another mode: then Kafka does not know which rows
    after the checkpoint are written. The sign is as old as the last micro-batch, so positions after it are younger.
    """

    def __init__(
        self, make: Callable[[str], Any], checkpoint: Path, settings: Mapping[str, str], group: str, *, accepts: bool
    ) -> None:
        """Prepare.

        Args:
            make: Makes what keeps the sign, for the id of the query.
            checkpoint: Folder of the flow's checkpoint.
            settings: Properties of Kafka's clients in Java.
            group: Group of the flow, to which the id of the query is added.
            accepts: Whether rows in doubt are written, perhaps a second time.
        """
        self._make = make
        self._checkpoint = checkpoint
        self._settings = settings
        self._group = group
        self._accepts = accepts
        self._target: Any = None
        self._kept = -1
        """The last micro-batch with which the sign was written."""
        self.failure: HeadraceError | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Do nothing: tasks write, and real-time mode shows the driver no micro-batch."""

    def writer(self, rows: DataFrame) -> DataStreamWriter:
        """Return Spark's writer of records with the position that they were made from.

        Raises:
            PipelineInvalid: Kafka does not know which rows are written, or `with_positions` refuses the flow.
            EnvironmentProblem: The brokers have older transactions.
        """
        rows = with_positions(rows)
        if any((self._checkpoint / "commits").glob("[0-9]*")):
            self._open()
        java = _java_writer(rows.sparkSession, self._settings, self._group)
        level = java.transactionVersion()
        if level < _TRANSACTIONS_LEVEL:
            text = (
                f"the brokers have transaction.version {level}, with which a late request can end a later transaction"
            )
            advice = "upgrade them to Kafka 4.0, and their feature transaction.version to 2"
            raise EnvironmentProblem(f"{text}: {advice}; or {_USE_INTERVAL}")
        writer: Any = rows.writeStream
        writer._jwrite.foreach(java)
        made: DataStreamWriter = writer
        return made

    def poll(self, completed: int) -> None:
        """Write the sign when the query has begun, and after each micro-batch."""
        if self._target is None and (self._checkpoint / "metadata").exists():
            self._open()
        if self._target:
            self._target.poll()
            if completed > self._kept:
                self._write(completed)

    def _open(self) -> None:
        query = json.loads((self._checkpoint / "metadata").read_text())["id"]
        completed = any((self._checkpoint / "commits").glob("[0-9]*"))
        self._target = self._make(query)
        known = self._target.open()
        has_sign = known is not None and self._target.digest == REAL_TIME
        if completed and not has_sign and not self._accepts:
            raise PipelineInvalid(
                "the sink does not know which rows after the checkpoint it has. Its record of positions has expired or "
                "was removed, or the flow was not exactly-once in real-time mode before. To write the rows, perhaps a "
                "second time, set sink.accept_unknown_batch: true for the next start"
            )
        if not has_sign:
            self._write(-1)

    def _write(self, completed: int) -> None:
        self._target.write(completed, _NO_ROWS, REAL_TIME)
        self._kept = completed


_NO_ROWS = pyarrow.table({name: pyarrow.array([], pyarrow.null()) for name in ("topic", "key", "value", "headers")})


def _java_writer(spark: Any, settings: Mapping[str, str], group: str) -> Any:
    """Return the writer of a flow."""
    jvm = spark._jvm
    values, arguments = jvm.java.util.HashMap(), spark.sparkContext._gateway.new_array(jvm.Object, 3)
    for name, value in settings.items():
        values.put(name, value)
    arguments[0], arguments[1], arguments[2] = values, group, _LINGER_MS
    return _writer_class(spark).getConstructors()[0].newInstance(arguments)


@functools.lru_cache(maxsize=1)
def _writer_class(spark: Any) -> Any:
    """Return the class that Spark's compiler makes of the source; tasks get it in a jar."""
    jvm = spark._jvm
    loader = jvm.Thread.currentThread().getContextClassLoader()
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(loader)
    compiler.setTargetVersion(_JAVA_LEVEL)
    compiler.cook(_SOURCE.read_text())
    jar = Path(os.environ["SPARK_LOCAL_DIRS"]) / "transaction-writer.jar"  # is emptied when a driver starts
    with zipfile.ZipFile(jar, "w") as archive:
        for name, code in compiler.getBytecodes().items():
            archive.writestr(f"{name.replace('.', '/')}.class", code)
    spark.sparkContext._jsc.addJar(str(jar))
    return compiler.getClassLoader().loadClass(_CLASS)
