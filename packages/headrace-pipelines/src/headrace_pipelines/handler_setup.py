"""Makes the settings with which a Python worker runs the handler of a flow, as it does for a function."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.errors import FunctionInvalid, PipelineInvalid
from headrace.functions import protocol
from headrace.functions.check import handler_problem
from headrace.functions.load import load_function
from headrace_pipelines.sources import KafkaSource
from headrace_pipelines.spec import PipelineSpec


def handler_problems(spec: PipelineSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield why handlers cannot run: path in the file and sentence."""
    for name, flow in spec.flows.items():
        try:
            if flow.handler:
                setup_of(spec, name)
        except PipelineInvalid as cause:
            yield ("flows", name, "handler"), cause.description


def setup_of(spec: PipelineSpec, name: str) -> protocol.Setup:
    """Return the settings of the handler of a flow: those of its function.yaml, or of its source.

    Raises:
        PipelineInvalid: The handler does not exist, the function.yaml is wrong, or it has explicit acknowledgement.
    """
    flow, folder = spec.flows[name], (spec.folder or Path()).absolute()
    handler, topic = flow.handler or "", next(iter(flow.sink.topics), "")
    if not handler.endswith((".yaml", ".yml")):
        if problem := handler_problem(handler, folder):
            raise PipelineInvalid(problem)
        source = spec.sources.get(flow.reads[0])
        value_format = source.value_format if isinstance(source, KafkaSource) else "json"
        trigger = protocol.TriggerSetup("kafka-cluster", name, "binary", value_format, "json", topic)
        return protocol.Setup(handler, str(folder), "0", [trigger], "default", "info", {})
    try:
        function = load_function(folder / handler, check_handler=True)
    except FunctionInvalid as cause:
        raise PipelineInvalid(cause.description) from cause
    if function.kafka_triggers[0].explicit_ack_mode != "disable":
        raise PipelineInvalid(
            f"{handler} has explicitAckMode: remove it, because a pipeline completes records with their micro-batch"
        )
    setup = function.setup(function.kafka_triggers[:1], "0", "info")
    return msgspec.structs.replace(setup, triggers=[msgspec.structs.replace(setup.triggers[0], output_topic=topic)])
