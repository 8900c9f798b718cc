"""`/adm/consumers`: status of the instances of active consumers."""

import msgspec

from headrace.http.endpoint import SEE, Call, Endpoint, may_control
from headrace.http.other_processes import OtherProcesses
from headrace.sidecar.active.monitor import InstanceStatus, ReadMonitor


class ActiveConsumers(msgspec.Struct):
    """The instances of one process, or of several that share a port, that the caller may see."""

    process: str
    """Host, port and process id."""
    consumers: list[InstanceStatus]


class GroupQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Selects instances."""

    group: str | None = None
    """Only those of this group."""


class ActiveStatusEndpoints:
    """Status of the instances of active consumers."""

    def __init__(self, monitor: ReadMonitor, process: str, others: OtherProcesses | None = None) -> None:
        """Serve those of this process, and of the other processes of the run if there are several."""
        self._others = others
        self._monitor = monitor
        self._process = process

    @Endpoint("GET", "/adm/consumers", "listActiveConsumers", "Every instance of active consumers in this process", SEE)
    async def list(self, call: Call[None, GroupQuery]) -> ActiveConsumers:
        found = [one for one in await self._monitor.statuses() if may_control(call.request, one.principal)]
        shown = [one for one in found if call.query.group in (None, one.group)]
        if self._others:
            shown += [one for other in await self._others.ask(call, ActiveConsumers) for one in other.consumers]
        return ActiveConsumers(self._process, shown)
