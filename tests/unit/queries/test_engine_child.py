"""What becomes of an engine of tables that does not follow the protocol."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from headrace.runtime import SystemClock
from headrace_queries.engine_child import EngineChild
from headrace_queries.engine_protocol import ToParent
from headrace_queries.query_sections import QuerySections
from tests.raw_server import until

FAKE = """\
    #!{python}
    import os, sys, time
    marks = {marks!r}
    number = int(sys.argv[sys.argv.index("headrace_queries.engine") + 1])
    if os.path.exists(marks):
        import msgspec
        from headrace.framing import encode_frame
        os.write(number, encode_frame((5, [])))  # `Statuses`: it is ready
        time.sleep(60)
    open(marks, "w").close()
    os.write(number, {sent!r})
    {end}
"""


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes is announced, 134217728 are allowed"),
        (b"\0\0\0\x05\x92\x05\xa2\xff\xfe", "a frame has an unexpected content"),
        (b"\0\0\0\x01\xc1", "a frame has an unexpected content"),
        (b"GET / HTTP/1.1\r\n\r\n", "are allowed"),
        (b"\0\0\0\x09\x92", "exit code 7"),
    ],
    ids=["too long", "not a text", "not msgpack", "another protocol", "half a frame"],
)
async def test_an_engine_that_does_not_follow_the_protocol_is_restarted(
    sent: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is ended, also if it goes on, and the next one is used."""
    program = tmp_path / "python"
    end = "os._exit(7)" if why == "exit code 7" else "time.sleep(60)"
    text = FAKE.format(python=sys.executable, marks=str(tmp_path / "second"), sent=sent, end=end)
    program.write_text(textwrap.dedent(text))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    taken: list[ToParent] = []
    child = EngineChild(QuerySections(), SystemClock(), statements=False, on_message=taken.append, on_end=taken.clear)
    await child.start()
    try:
        await until(lambda: not child.problem, seconds=20)
    finally:
        process = child._process
        await child.stop()
        if process:
            await process.process.wait()
    assert "the engine ended (" in caplog.text and why in caplog.text
