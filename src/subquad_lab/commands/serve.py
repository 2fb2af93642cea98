"""`subquad serve`: the report on a local web page that follows the runs while they train."""

import errno
import os
import threading
from pathlib import Path

from subquad_lab import UsageError
from subquad_lab.report.live.server import HOST, Server
from subquad_lab.system.text import say

MAX_PORT = 65535
NICENESS = 10  # Training comes first, but a page must not wait for it.


def run(root: Path, port: int) -> None:
    """Serve the report about the runs in `root` until Ctrl-C."""
    if not 0 <= port <= MAX_PORT:
        raise UsageError(f"--port: expected an integer from 0 to {MAX_PORT}, got {port}")
    if not root.exists():
        raise UsageError(f"--root: no such folder: {root}; start a run with `subquad train EXPERIMENT`")
    if not root.is_dir():
        raise UsageError(f"--root: expected a folder, got the file {root}")
    if hasattr(os, "nice"):
        os.nice(NICENESS)  # before the server starts threads, which inherit it
    try:
        server = Server(root.resolve(), port)
    except OSError as error:
        hint = "; choose another port, or 0 for any free one" if error.errno == errno.EADDRINUSE else ""
        raise UsageError(f"--port: cannot listen on {HOST}:{port}: {error.strerror}{hint}") from error
    with server:
        say(f"http://{HOST}:{server.port}", f"Serving {root}, read-only, for this machine only. Stop with Ctrl-C.",
            flush=True)  # fmt: skip
        # Ctrl-C interrupts the main thread wherever it is. Between the start of a reader's thread and its own next
        # request, it would close that reader's connection twice: so the main thread only waits.
        answering = threading.Thread(target=server.serve_forever, name="server", daemon=True)
        answering.start()
        try:
            answering.join()
        finally:
            server.shutdown()
