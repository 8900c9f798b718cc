"""Queries as DataFrames: SQL over the sources and views that are registered, and Python functions."""

import sys
import traceback
from pathlib import Path

from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession

from headrace.errors import PipelineInvalid
from headrace_pipelines.driver.python_names import imported
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.spec import FlowSpec, QuerySpec


def register_view(spark: SparkSession, plan: DriverPlan, name: str) -> None:
    """Make a view known to SQL under its name."""
    rows_of(spark, plan, plan.spec.views[name]).createOrReplaceTempView(name)


def rows_of(spark: SparkSession, plan: DriverPlan, query: QuerySpec) -> DataFrame:
    """Return the rows of a query.

    Raises:
        PipelineInvalid: The Python function is missing, fails, or does not return a DataFrame.
    """
    if query.sql:
        return spark.sql(query.sql)
    if isinstance(query, FlowSpec) and query.handler:
        from headrace_pipelines.driver.handlers import records_of_handler  # here, because most pipelines have none

        return records_of_handler(spark, plan, query)
    if isinstance(query, FlowSpec) and query.processor:
        from headrace_pipelines.driver.stateful_rows import rows_of_processor  # here, for the same reason

        return rows_of_processor(spark, plan, query)
    assert query.python
    function = imported(str(plan.spec.folder or ""), query.python, "python")
    if plan.spec.driver.remote:
        _send_with_functions(str(plan.spec.folder or ""))
    try:
        found = function(*(spark.table(name) for name in query.reads))
    except Exception as cause:  # boundary to user code: the status shows where it failed
        line = traceback.extract_tb(cause.__traceback__)[-1]
        at = f"{line.filename}:{line.lineno}"
        raise PipelineInvalid(f"python: {query.python} failed: {type(cause).__name__}: {cause} ({at})") from cause
    if not isinstance(found, DataFrame):
        raise PipelineInvalid(f"python: {query.python} returned {type(found).__name__}: return a DataFrame")
    return found


def _send_with_functions(folder: str) -> None:
    """Pickle functions with the modules of a folder, because workers of a Connect server may not find them.

    For a function of a column the server's workers do not look for sent files; for a handler they do.
    """
    for module in list(sys.modules.values()):
        if Path(getattr(module, "__file__", None) or "/").parent == Path(folder):
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
