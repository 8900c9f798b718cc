"""Functions: Nuclio's `handler(context, event)`, run in worker processes."""

from headrace.feature import CliCommand, Feature

FEATURE = Feature(
    name="functions",
    parts="headrace.functions.function_parts:FunctionParts",
    commands={"function": CliCommand("headrace.cli.function:function", "Run and check functions, call a handler.")},
    topics="headrace.functions.function_parts:required_topics",
    checks="headrace.functions.function_checks:FunctionChecks",
    # The control table is created like the first topic that is read: that of a reactive consumer, if there is one.
    needs=["consumers", "commands", "reactive"],
)
