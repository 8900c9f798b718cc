"""`/adm/functions`: reload of the files of a function."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from headrace import errors
from headrace.errors import FunctionInvalid, InvalidRequest, NotFound
from headrace.http.endpoint import ADMINISTER, Call, CallEvent, Endpoint
from headrace.http.other_processes import OtherProcesses

if TYPE_CHECKING:
    from headrace.functions.reload import FunctionReload


class Reloaded(msgspec.Struct):
    """The function whose workers are being replaced."""

    function: str


class FunctionEndpoints:
    """Reloads of functions."""

    def __init__(self, reloads: "Mapping[str, FunctionReload]", others: OtherProcesses | None = None) -> None:
        """Serve the reloads of running functions; the other processes of the run, if there are any, reload too."""
        self._others = others
        self._reloads = reloads

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
