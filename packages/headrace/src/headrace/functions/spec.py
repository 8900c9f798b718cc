"""The model of a function.yaml: Nuclio's keys, with Headrace's own among the attributes of a trigger.

Unknown keys are warnings, because Nuclio ignores them and unmodified files must load; wrong values are errors.
Where Nuclio's documentation and code disagree, the documented default counts.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from headrace.config.section import Number
from headrace.functions import protocol
from headrace.functions.file_values import AnyCase, Duration, FilePart, Whole
from headrace.functions.triggers.kafka_trigger import KafkaTrigger
from headrace.functions.triggers.trigger import Trigger

_LEVELS: Final = ("debug", "info", "warning", "error")


def _handler(text: str) -> str:
    if not re.fullmatch(r"[\w|-]+(\.[\w|-]+)*:\w+", text):
        raise ValueError(f"is {text!r}: write module:function, such as main:handler")
    return text


class Variable(FilePart):
    """One environment variable."""

    name: Annotated[str, Field(pattern=r"^[^=\x00]+$")]
    value: str = ""
    value_from: Any = None
    """A reference to Nuclio's platform or a secret; such a variable is left out."""


class LoggerSink(FilePart):
    """One destination of log lines; Headrace has one log."""

    level: Annotated[Literal["debug", "info", "warning", "error"], AnyCase] = "debug"


class FunctionSpec(FilePart):
    """One function file."""

    name: str
    namespace: str = "default"
    description: str = ""
    version: Annotated[int, Number] = 0
    handler: Annotated[str, AfterValidator(_handler)]
    """`module.sub:function`."""
    variables: Annotated[list[Variable], Field(alias="env")] = []
    event_timeout_seconds: Annotated[Annotated[float, Field(gt=0), Duration] | None, Field(alias="eventTimeout")] = None
    """Longest time for one event; None for no limit."""
    readiness_timeout_seconds: Annotated[int, Field(ge=0, le=86_400), Number, AfterValidator(lambda n: n or 60)] = 60
    """Longest time for loading the handler and `init_context`; 0 in the file means the default."""
    logger_sinks: list[LoggerSink] = []
    max_replicas: Whole | None = None
    """The most processes that may run this function."""
    folder: Path
    """The folder of the file, which holds the handler's module."""
    triggers: list[Trigger]
    """Those whose events are requests are last."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        single = next((trigger for trigger in self.triggers if trigger.requests), None)
        if single and any(trigger.batch.mode == "enable" for trigger in self.triggers):
            text = f"of kind {single.kind}, whose calls have one event, and batch, whose calls have a list"
            remedy = "write batch: {mode: disable}, or move one to another function"
            raise ValueError(f"triggers have {single.name} {text}: {remedy}")
        fixed = next((trigger for trigger in self.kafka_triggers if trigger.kafka.partitions), None)
        if fixed and (self.max_replicas or 1) > 1:
            text = f"maxReplicas is {self.max_replicas}, and each replica would read the partitions of {fixed.name}"
            raise ValueError(f"{text}: write maxReplicas: 1, or remove partitions")
        acknowledging = [trigger for trigger in self.kafka_triggers if trigger.explicit_ack_mode != "disable"]
        topics = [topic for trigger in acknowledging for topic in trigger.topics]
        if twice := next((topic for topic in topics if topics.count(topic) > 1), ""):
            raise ValueError(
                f"triggers has two with explicitAckMode that read {twice}, and an acknowledgement names no trigger: "
                "move one of them to another function"
            )
        return self

    @property
    def kafka_triggers(self) -> list[KafkaTrigger]:
        """The triggers whose events are records of topics."""
        return [trigger for trigger in self.triggers if isinstance(trigger, KafkaTrigger)]

    @property
    def only_groups(self) -> bool:
        """Whether all of its events are records that the members of a group share."""
        return len([one for one in self.kafka_triggers if not one.kafka.partitions]) == len(self.triggers)

    @property
    def log_level(self) -> str:
        """The least level of the function's log lines; empty for that of the process."""
        return min((sink.level for sink in self.logger_sinks), key=_LEVELS.index, default="")

    @property
    def worker_pools(self) -> list[list[Trigger]]:
        """The triggers, those together that share their workers."""
        pools: dict[tuple[str, str], list[Trigger]] = {}
        for trigger in self.triggers:
            shared = trigger.allocator_name
            pools.setdefault((shared, "" if shared else trigger.name), []).append(trigger)
        return [*pools.values()]

    def setup(self, triggers: Iterable[Trigger], worker_id: str, log_level: str) -> protocol.Setup:
        """Return the settings of a worker of these triggers."""
        settings = []
        for one in triggers:
            formats = one.key_format, one.value_format, one.output_format
            batch_size = one.batch.batch_size if one.batch.mode == "enable" else 0
            outputs = one.output_topic, batch_size, one.requests
            settings.append(protocol.TriggerSetup(one.kind, one.name, *formats, *outputs))
        about = {"NAME": self.name, "DESCRIPTION": self.description, "VERSION": str(self.version)}
        about["HANDLER"] = self.handler
        return protocol.Setup(
            handler=self.handler,
            folder=str(self.folder),
            worker_id=worker_id,
            triggers=settings,
            namespace=self.namespace,
            log_level=log_level,
            env={**{f"NUCLIO_FUNCTION_{name}": text for name, text in about.items()}, **self.env},
        )

    @property
    def env(self) -> Mapping[str, str]:
        """Environment of the workers, added to this process's own without the settings of Headrace."""
        return {variable.name: variable.value for variable in self.variables if variable.value_from is None}
