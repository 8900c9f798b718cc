"""A function in the foreground: its handler is called in this process, where a debugger stops in it."""

import mmap
import os
from collections.abc import Mapping, Sequence, Set

import msgspec

from headrace.errors import FunctionInvalid
from headrace.framing import FrameReader
from headrace.functions import protocol
from headrace.functions.frames import Response
from headrace.functions.sdk import print_line
from headrace.functions.worker.handler import Unusable, context_of
from headrace.functions.worker.loop import prepare
from headrace.functions.workers import FunctionService
from headrace.records import TopicPartition
from headrace.runtime import run_blocking


class ForegroundFunction(FunctionService):
    """Serves each frame on a thread of this process: no limit applies, and a crash ends the process."""

    async def serve(
        self,
        candidates: Sequence[int],
        partition: TopicPartition,
        frame: bytearray,
        records: int,
        schemas: Mapping[int, protocol.Schema],
        ending: Set[TopicPartition] = frozenset(),
    ) -> Response:
        """Load the handler, let it do one encoded frame of work, and return its response.

        Raises:
            FunctionInvalid: The handler cannot be loaded, or `init_context` failed.
        """
        # Not on the loop's thread, because a handler may run another event loop.
        return await run_blocking(self._serve, bytes(frame), schemas)

    def _serve(self, frame: bytes, schemas: Mapping[int, protocol.Schema]) -> Response:
        setup = msgspec.structs.replace(self._setup(0, self.spec), log_level="debug")
        os.environ.update(setup.env)
        try:
            runs, serving = prepare(setup, context_of(setup, print_line), mmap.mmap(-1, mmap.PAGESIZE))
        except Unusable as cause:
            raise FunctionInvalid(str(cause)) from cause
        for schema in schemas.values():
            serving.bodies.learn(schema)
        [work] = FrameReader(protocol.decode_to_worker).feed(frame)
        assert isinstance(work, protocol.Work)
        [response] = FrameReader(protocol.decode_to_parent).feed(bytes(runs.run(serving.serve(work))))
        assert isinstance(response, protocol.Done | protocol.Results)
        runs.close()
        return response
