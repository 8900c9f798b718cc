"""`/adm/functions`: how many processes a function needs, also while none runs it, and reload of its files."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec

from headrace import errors
from headrace.consumers.lag import PartitionLag
from headrace.errors import FunctionInvalid, InvalidRequest, KafkaUnavailable, NotFound
from headrace.http.endpoint import ADMINISTER, SEE, Call, CallEvent, Endpoint, may_control
from headrace.http.other_processes import OtherProcesses
from headrace.records import TopicPartition

if TYPE_CHECKING:
    from headrace.functions.reload import FunctionReload
    from headrace.functions.spec import FunctionSpec


class ScaleQuery(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The work that one process can do."""

    lag_per_replica: Annotated[int, msgspec.Meta(ge=1)] = 1000
    """Records that may wait for each process."""


class ScaleHint(msgspec.Struct, rename="camel"):
    """How many processes a function needs now."""

    function: str
    desired_replicas: int
    """Between `minReplicas` and `maxReplicas`, and not more than can have a partition."""
    min_replicas: int
    max_replicas: int
    lag: int
    """Records that the groups of the function have not committed."""
    triggers: Mapping[str, int]
    """The lag of each trigger."""


class Reloaded(msgspec.Struct):
    """The function whose workers are being replaced."""

    function: str


class FunctionEndpoints:
    """Scale hints and reloads of functions."""

    def __init__(
        self,
        functions: "Iterable[FunctionSpec]",
        lag_of: Callable[[str], Mapping[TopicPartition, PartitionLag]],
        reloads: "Mapping[str, FunctionReload]",
        others: OtherProcesses | None = None,
    ) -> None:
        """Serve these functions.

        Args:
            lag_of: Returns the last known lag of a group.
            reloads: Those of running functions.
            others: The other processes of the run, if there are several; they reload, too.
        """
        self._others = others
        self._functions = {function.name: function for function in functions}
        self._lag_of = lag_of
        self._reloads = reloads

    @Endpoint(
        "GET",
        "/adm/functions/{name}/scale",
        "scaleFunction",
        "How many processes a function needs by its lag, also while none runs it",
        SEE,
        errors=(NotFound, errors.KafkaUnavailable),
    )
    async def scale(self, call: Call[None, ScaleQuery]) -> ScaleHint:
        name, functions = call.parameters["name"], self._functions if may_control(call.request, "") else {}
        if name not in functions:
            raise NotFound(
                f"function {name[:60]!r} is not configured here; configured: {', '.join(sorted(functions)) or 'none'}"
            )
        spec, needed, lags = functions[name], 0, dict[str, int]()
        least, most = spec.replica_bounds
        for trigger in spec.kafka_triggers:
            lag_of_group = self._lag_of(trigger.group).items()
            found = [lag.lag for partition, lag in lag_of_group if partition.topic in trigger.topics]
            if not found:
                why = "Kafka or its topics do not answer"
                raise KafkaUnavailable(f"the lag of group {trigger.group} is not known: {why}")
            lags[trigger.name] = sum(found)
            # With more processes than partitions that have records, some would be idle.
            processes = min(math.ceil(sum(found) / call.query.lag_per_replica), sum(1 for lag in found if lag))
            needed = max(needed, processes)
        most = max(1, most)
        return ScaleHint(spec.name, max(least, min(needed, most)), least, most, sum(lags.values()), lags)

    @Endpoint(
        "POST",
        "/adm/functions/{name}/reload",
        "reloadFunction",
        "Replace the workers of a function by ones with its present files; its consumers stay in their groups",
        ADMINISTER,
        errors=(NotFound, errors.InvalidRequest),
        audited="reload",
    )
    async def reload(self, call: Call[None, None]) -> Reloaded:
        name = call.parameters["name"]
        call.event = CallEvent(f"function {name}")
        if name not in self._reloads:
            raise NotFound(f"function {name[:60]!r} does not run here; running: {', '.join(self._reloads) or 'none'}")
        try:
            await self._reloads[name].reload()
        except FunctionInvalid as cause:
            raise InvalidRequest(
                f"the changed files were rejected, keeping the old workers: {cause.description}"
            ) from cause
        if self._others and self._others.concern(call.request):
            await self._others.responses(call.request)
        return Reloaded(name)
