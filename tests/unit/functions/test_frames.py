"""The frames of a worker as the parent counts them, and how many records make one."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from headrace.errors import WorkerLost
from headrace.framing import ProtocolBroken
from headrace.functions import protocol
from headrace.functions.frames import NOTHING_BEGUN, FramesInFlight, open_shared_page
from headrace.functions.workers import FramePace
from headrace.records import TopicPartition
from yaml_table import table

P = TopicPartition("t", 0)


def lost(begun: int) -> WorkerLost:
    return WorkerLost("gone", begun=begun)


@pytest.mark.parametrize(("begun", "expected"), table(__file__, "records_begun_belong_to_the_frame_that_was_at_work"))
async def test_records_begun_belong_to_the_frame_that_was_at_work(begun: int, expected: list[int]) -> None:
    """Only that one has a record to blame."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    frames = FramesInFlight(memory)
    responses = [frames.add(2, P), frames.add(3, P), frames.add(2, P)]
    memoryview(memory).cast("Q")[0] = 2
    frames.completed(protocol.Done())
    assert isinstance(await responses[0], protocol.Done)
    memoryview(memory).cast("Q")[0] = 2 + begun
    frames.lose(lost)
    for response, count in zip(responses[1:], expected, strict=True):
        with pytest.raises(WorkerLost) as caught:
            await response
        assert caught.value.parameters["begun"] == count
    frames.close()


async def test_a_frame_is_begun_by_the_worker_or_recalled_and_never_both() -> None:
    """Who reads its number first has it."""
    frames = FramesInFlight(mmap.mmap(-1, mmap.PAGESIZE))
    for _ in range(600):  # numbers begin anew after 256
        first, second = frames.add(1, P), frames.add(1, P)
        number = os.read(frames.claims, 1)[0]
        assert frames.recall() == 1
        assert (first.done(), await second) == (False, NOTHING_BEGUN)
        assert frames.numbers == {number}
        assert frames.recall() == 0
        frames.completed(protocol.Done())
        assert await first == protocol.Done()
    frames.close()


def test_the_page_of_two_processes_is_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a hole in a file of /tmp: where that is full, an access ends the process by SIGBUS."""
    shared = open_shared_page()
    assert str(Path(f"/proc/self/fd/{shared}").readlink()).startswith("/memfd:")
    assert os.fstat(shared).st_blocks * 512 == mmap.PAGESIZE
    monkeypatch.setattr(os, "memfd_create", Mock(return_value=shared))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    closed = Mock(wraps=os.close)  # another thread may open a file of the same number
    monkeypatch.setattr(os, "close", closed)
    with pytest.raises(OSError, match="full"):
        open_shared_page()
    closed.assert_any_call(shared)


async def test_responses_that_do_not_fit_are_refused() -> None:
    """Without a frame, or with more results than records, or none; fewer are a failure, or what fits in a response."""
    frames = FramesInFlight(mmap.mmap(-1, mmap.PAGESIZE))
    with pytest.raises(ProtocolBroken):
        frames.completed(protocol.Done())
    frames.add(2, P)
    for response in (protocol.Results([]), protocol.Results([None] * 3), protocol.Done(0.0, [b"one"])):
        with pytest.raises(ProtocolBroken):
            frames.completed(response)
    assert frames.completed(protocol.Results([None])) == 1
    frames.close()


def test_frames_grow_while_the_handler_is_fast_and_shrink_when_it_is_slow() -> None:
    """To about a twentieth of a second, and never to nothing."""
    pace = FramePace()
    for _ in range(20):
        pace.learn(records := pace.records, records * 0.001)
    assert 45 <= pace.records <= 51
    for _ in range(20):
        pace.learn(records := min(2000, pace.records), records * 0.000_002)
    assert pace.records > 2000
    for _ in range(20):
        pace.learn(records := min(2000, pace.records), records * 10.0)
    assert pace.records == 1
    for _ in range(60):
        pace.learn(records := min(2000, pace.records), records * 0.000_002)
    assert pace.records > 2000
