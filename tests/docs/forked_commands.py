"""`headrace` as a shell finds it, without the second that a new interpreter takes to import it.

A folder for `PATH` has a program of that name. It asks the process of the tests, which forks the command with the
program's folder, variables and descriptors.
"""

from __future__ import annotations

import contextlib
import json
import socketserver
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from headrace_devkit.testing.forked import ForkedCommand

LIMIT_SECONDS = 240
PROGRAM = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    asked.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), os.getpid()]).encode() + b"\\n")
    sys.exit(int(asked.makefile().readline()))
"""


class Handler(socketserver.StreamRequestHandler):
    """One command: it writes to where its program would write."""

    def handle(self) -> None:
        words, folder, env, pid = json.loads(self.rfile.readline())
        stdin, output, errors = (Path(f"/proc/{pid}/fd/{number}") for number in range(3))
        code = ForkedCommand(words, Path(folder), env, output, errors, stdin).wait(LIMIT_SECONDS)
        self.wfile.write(b"%d\n" % (code if code >= 0 else 128 - code))


@contextlib.contextmanager
def forked_commands(folder: Path) -> Iterator[Path]:
    """Return the folder for `PATH`, where the program is as long as the block lasts."""
    program, address = folder / "headrace", str(folder / "commands")
    program.write_text(PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o700)
    with socketserver.ThreadingUnixStreamServer(address, Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield folder
        finally:
            server.shutdown()
            thread.join()
