"""A trigger whose events are HTTP requests: its settings."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headrace.config.section import Number
from headrace.functions.triggers.trigger import S, Trigger, TriggerParts


class HttpTrigger(Trigger):
    """A trigger of kind `http`: events are requests."""

    kinds: ClassVar[tuple[str, ...]] = ("http",)
    mapping: ClassVar[str] = "attributes.http"
    requests: ClassVar[bool] = True
    unused: ClassVar[tuple[str, ...]] = ("explicitAckMode", "waitExplicitAckDuringRebalanceTimeout", "url")

    port: Annotated[int, Field(ge=0, le=65_535), Number] = 8080
    max_body_bytes: Annotated[int, Field(ge=0, le=1 << 28, alias="maxRequestBodySize"), Number] = 4_194_304
    worker_wait_ms: Annotated[int, Field(alias="workerAvailabilityTimeoutMilliseconds"), Number] = 10_000
    """The longest wait for a worker; below 0 means the default."""
    value_format: Literal["json"] = "json"

    def serve(self, parts: TriggerParts[S]) -> Sequence[S]:
        """Let a listener answer requests; it begins with the other listeners of the process."""
        parts.listen(self)
        return []
