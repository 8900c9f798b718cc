"""A process of several that does not follow the protocol."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.app.several_processes import SeveralProcesses
from headrace.config.model import HeadraceConfig
from headrace.runtime import SystemClock
from headrace.runtime.notification import Notifications
from headrace.runtime.process_link import DRAIN
from tests.raw_server import until

FAKE = """\
    #!{python}
    import os, socket, time
    from headrace.framing import encode_frame
    end = socket.socket(fileno=0)
    received = end.recv(100_000)
    for start in range(3):
        if not os.path.exists({folder!r} + f"/start {{start}}"):
            open({folder!r} + f"/start {{start}}", "w").close()
            break
    if start == 1:
        end.sendall(encode_frame({{"STATUS": "starting", "LINE": ""}}) + {sent!r})
        {goes_on}
    else:
        end.sendall(encode_frame({{"READY": "1", "LINE": "ready"}}))
        while not received.endswith({drain!r}):
            received += end.recv(100_000)
"""


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes is announced, 1048576 are allowed"),
        (b"\0\0\0\x01\xc1", "a frame has an unexpected content"),
        (b'{"READY": "1"}\n', "does not follow the protocol"),
        (b"\0\0\0\x09\x81", "process 1 ended with exit code 0"),
    ],
    ids=["too long", "not msgpack", "lines", "half a frame"],
)
async def test_a_process_that_does_not_follow_the_protocol_is_restarted(
    sent: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is ended, and the run goes on; one that ends with code 0 in the middle of a frame ends the run."""
    ends = "exit code" in why
    program = tmp_path / "python"
    goes_on = "pass" if ends else "time.sleep(60)"
    text = FAKE.format(python=sys.executable, folder=str(tmp_path), sent=sent, goes_on=goes_on, drain=DRAIN)
    program.write_text(textwrap.dedent(text))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    caplog.set_level("INFO")
    lines: list[str] = []
    config = HeadraceConfig.model_validate({"processes": 2, "http": {"port": 0}})
    several = SeveralProcesses(config, tmp_path, lambda: config, lines.append, SystemClock(), Notifications({}))
    running = asyncio.ensure_future(several.run_all())
    if not ends:
        await until(lambda: lines, seconds=20)
        several._signals.drain_requested.set()
    assert await running == 0
    assert lines == ([] if ends else ["ready"]) and why in caplog.text
