"""A reader of the events: slow, deaf, gone or idle."""

import socket
from types import SimpleNamespace

import pytest

from subquad_lab.report.live import listener as module
from subquad_lab.report.live.listener import DEAF_SECONDS, HEARTBEAT_SECONDS, Listener


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that stands still until it is set."""
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: found.now)
    return found


@pytest.fixture
def pair(clock):
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    far.setblocking(False)
    left = []
    yield Listener(near, 0, left.append), far, left
    near.close()
    far.close()


def received(far: socket.socket) -> bytes:
    found = b""
    try:
        while piece := far.recv(1 << 16):
            found += piece
    except BlockingIOError:
        pass
    return found


def test_a_slow_reader_gets_all_of_one_message_before_newer_ones(pair, clock):
    listener, far, left = pair
    long, found = b"data: " + b"x" * 100_000 + b"\n\n", b""
    assert listener.send(1, long) and listener.seen == 1
    for clock.now in range(1, 1000):
        found += received(far)
        assert listener.send(2, b"data: 2\n\n")
        if listener.seen == 2:
            break
    assert found + received(far) == long + b"data: 2\n\n" and left == []


def test_a_reader_who_does_not_read_is_left_after_a_while(pair, clock):
    listener, _, left = pair
    clock.now = 1000.0  # Idle time before a message does not count.
    assert listener.send(1, b"x" * 1_000_000) and listener.send(1, b"")
    clock.now += DEAF_SECONDS - 1
    assert listener.send(1, b"") and left == []
    clock.now += 1
    assert not listener.send(1, b"") and len(left) == 1


def test_an_idle_reader_gets_heartbeats_and_one_who_has_gone_is_left(pair, clock):
    listener, far, left = pair
    assert listener.send(0, b"") and received(far) == b""
    clock.now = HEARTBEAT_SECONDS
    assert listener.send(0, b"") and received(far) == b":\n\n"
    assert listener.send(0, b"") and received(far) == b""
    far.close()
    clock.now *= 2
    assert not listener.send(0, b"") and len(left) == 1
