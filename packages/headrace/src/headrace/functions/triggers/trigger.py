"""The settings of triggers of every kind."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from headrace.config.consumers import OTHER_ERRORS, Action, DeadLetterConfig, Ordering, RetryConfig
from headrace.config.section import FormatName, Number, PlainFormatName, TopicName
from headrace.config.topic_names import external_topic
from headrace.errors import FunctionInvalid
from headrace.functions.file_values import AnyCase, Duration, FilePart, Limit, Pause, Workers, parse_size
from headrace.functions.function_keys import FunctionKey
from headrace.functions.sections import FileReader, FileSection

_ACTIONS: Mapping[str, Action] = {"deadLetter": "dead_letter", "handled": "skip"}
"""What `onFailure` means for errors that `retry.errors` does not name."""


class HandlerBatch(FilePart):
    """How many events one call of a batch handler gets."""

    mode: Annotated[Literal["disable", "enable"], AnyCase] = "disable"
    batch_size: Annotated[int, Field(ge=1, le=100_000), Number] = 10
    timeout: Limit = 1.0
    """The longest wait for a full batch."""


S = TypeVar("S")


class TriggerParts(NamedTuple, Generic[S]):
    """What serves the triggers of a process; `S` is the type of its services."""

    consume: Callable[[Any], Sequence[S]]
    """Makes the consumer of a trigger with topics."""
    listen: Callable[[Any], None]
    """Makes the listener of a trigger with a port."""
    destination: Callable[[Any], Any]
    """Makes the way to the workers, for a kind whose events are neither."""


class Trigger(FilePart):
    """The settings of triggers of every kind: workers, formats, output, and the policy for failed events.

    Each kind of trigger is a subclass with its settings.
    """

    kinds: ClassVar[tuple[str, ...]]
    """Its names in the file."""
    mapping: ClassVar[str]
    """The mapping of the table of keys that has those of its `attributes`."""
    requests: ClassVar[bool] = False
    """Whether its events are requests: a call has one event, and a function has one such trigger."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Keys of the trigger itself that have no effect for this kind."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    kind: str
    disabled: Annotated[bool, Field(strict=True)] = False
    num_workers: Workers = 0
    max_workers: Workers = 0
    allocator_name: Annotated[str, Field(alias="workerAllocatorName", pattern=r"^[A-Za-z0-9._-]*$")] = ""
    """Triggers with the same name share their workers; empty for separate workers."""
    allocation: Annotated[Literal["pool", "static", "key"], Field(alias="workerAllocationMode"), AnyCase] = "pool"
    """`pool`: the first free worker; `static`: a partition always has the same one; `key`: a key has."""
    termination_seconds: Annotated[float, Field(ge=0, alias="workerTerminationTimeout"), Duration] = 10.0
    """The longest time that a worker may take to end."""
    memory_limit_bytes: Annotated[int, Field(ge=0, alias="workerMemoryLimit"), BeforeValidator(parse_size)] = 0
    """Resident memory of a worker, above which it is replaced; 0 for no limit. A setting of Headrace."""
    on_failure: Annotated[Literal["retry", "deadLetter", "handled", "stop"], AnyCase] = "retry"
    """What happens to a record whose handler fails; a setting of Headrace. `retry`: called again, as `retry` sets it,
    then a dead letter. `deadLetter`: a dead letter at once. `handled`: completed, as in Nuclio, and counted as failed.
    `stop`: its partition stops after the last attempt."""
    explicit_ack_mode: Annotated[Literal["disable", "enable", "explicitOnly"], AnyCase] = "disable"
    """Whether the handler, an explicit acknowledgement, or either of them completes a record."""
    explicit_ack_wait: Annotated[Pause, Field(alias="waitExplicitAckDuringRebalanceTimeout")] = 0.1
    """The longest wait for acknowledgements before a partition is released."""
    batch: HandlerBatch = HandlerBatch()
    delivery: Annotated[Literal["at_least_once", "exactly_once"], AnyCase] = "at_least_once"
    """Whether outputs and offsets are committed in one transaction."""
    ordering: Annotated[Ordering, AnyCase] = "partition"
    """Which records wait for each other; a setting of Headrace, as are the following."""
    key_format: Annotated[FormatName, AnyCase] = "binary"
    value_format: Annotated[FormatName, AnyCase] = "binary"
    output_topic: Annotated[TopicName, AfterValidator(external_topic)] | Literal[""] = ""
    """Topic of the outputs; empty for none."""
    output_format: Annotated[PlainFormatName, AnyCase] = "json"
    dead_letter: Annotated[
        DeadLetterConfig, Field(alias="deadLetterTopic"), BeforeValidator(lambda topic: {"topic": topic})
    ] = DeadLetterConfig()
    retry_settings: Annotated[RetryConfig, Field(alias="retry")] = RetryConfig()
    """The policy for failed records, as in a reactive consumer."""

    @property
    def retry(self) -> RetryConfig:
        """The policy for failed records."""
        if action := _ACTIONS.get(self.on_failure):
            errors = {OTHER_ERRORS: action, **self.retry_settings.errors}
            return self.retry_settings.model_copy(update={"errors": errors})
        return self.retry_settings

    @property
    def dead_letters(self) -> DeadLetterConfig:
        """Where dead letters go, and whether there are any."""
        return self.dead_letter.model_copy(update={"enabled": self.on_failure != "stop"})

    @property
    def workers(self) -> int:
        return self.num_workers or self.max_workers or 1

    @classmethod
    def models(cls) -> list[type[BaseModel]]:
        return [cls]

    @classmethod
    def own_keys(cls) -> list[FunctionKey]:
        """Return its own keys for the table of keys; a mapping that is in the table's file keeps those."""
        own = {name: field for name, field in cls.model_fields.items() if name not in Trigger.model_fields}
        return [
            FunctionKey(cls.mapping, field.alias or name, "", "", field.description or "")
            for name, field in own.items()
        ]

    def serve(self, parts: TriggerParts[S]) -> Sequence[S]:
        """Return the services that bring its events to the workers.

        Raises:
            FunctionInvalid: The kind does not say how.
        """
        raise FunctionInvalid(f"trigger {self.name}: no service is made for triggers of kind {self.kind}")

    @classmethod
    def read(cls, file: FileReader, own: FileSection, attributes: FileSection) -> Self | None:
        """Return the trigger; None if something is wrong, which is reported.

        `own` is its mapping; what of it the model has is also among the attributes.
        """
        return file.model(cls, attributes)
