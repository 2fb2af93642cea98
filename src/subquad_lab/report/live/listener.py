"""One reader of the events, who is sent as many bytes of the newest messages as the connection accepts without waiting.

    messages or a heartbeat  ->  bytes left to send  ->  as many as fit now  ->  the rest in the next round

A reader that is slow gets fewer messages, because only the newest of each run is ever sent. All readers are served by
one thread: a thread for each would wake hundreds at every message, which slows a training far more than their work.
"""

import socket
import time
from collections.abc import Callable

HEARTBEAT_SECONDS = 15.0  # between events, so that a reader who has gone is noticed
DEAF_SECONDS = 10.0  # without accepting a byte, after which the connection is ended


class Listener:
    """A connection that is sent events; `leave` ends it."""

    def __init__(self, connection: socket.socket, seen: int, leave: Callable[[socket.socket], None]) -> None:
        connection.setblocking(False)
        self._connection, self._leave = connection, leave
        self._left = memoryview(b"")
        self._moved = time.monotonic()  # when something was last to be sent, or accepted
        self.seen = seen

    def send(self, version: int, messages: bytes) -> bool:
        """Send the messages between versions `seen` and `version`, or the rest of earlier ones.

        Return False, with the connection ended, if the reader has gone or does not read.
        """
        now = time.monotonic()
        if not self._left and (messages or now - self._moved >= HEARTBEAT_SECONDS):
            self._left, self._moved, self.seen = memoryview(messages or b":\n\n"), now, version
        try:
            if self._left:
                self._left = self._left[self._connection.send(self._left) :]
                self._moved = now
            return True
        except BlockingIOError:
            if now - self._moved < DEAF_SECONDS:
                return True
        except OSError:
            pass  # The reader has gone.
        self._leave(self._connection)
        return False
