"""The server: read-only, for this machine only, and not to be blocked or ended by any client."""

import http.client
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from small_runs import unfinish
from subquad_lab.report.live import rendering
from subquad_lab.report.live import server as module
from subquad_lab.report.live.server import Server
from subquad_lab.report.page import page
from subquad_lab.training.run import Run

FETCH_SECONDS = 60.0  # The first page may be rendered on a busy machine.


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def server(root, monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr("subquad_lab.report.live.watcher.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("subquad_lab.report.live.watcher.FIND_SECONDS", 0.05)
    monkeypatch.setattr("subquad_lab.report.live.watcher.BUSY_SHARE", 0.5)
    with Server(root, 0) as found:
        threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield found
        found.shutdown()


def raw(server: Server, request: bytes, seconds: float = FETCH_SECONDS) -> bytes:
    """Send bytes and return the whole answer, or the beginning of one that does not end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(request)
        answer = b""
        while added := connection.recv(1 << 16):
            answer += added
            if b"text/event-stream" in answer and not request.startswith(b"HEAD"):
                break
        return answer


def get(server: Server, path: str = "/", host: str | None = None, method: str = "GET", more: str = "") -> bytes:
    host = f"127.0.0.1:{server.port}" if host is None else host
    return raw(server, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode("latin-1"))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def headers(answer: bytes) -> dict[str, str]:
    lines = answer.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")[1:]
    return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}


# --- What is served, and to whom --------------------------------------------------------------------------------------


def test_the_page_and_its_headers(server):
    answer = get(server)
    head = headers(answer)
    assert status(answer) == 200 and head["content-type"] == "text/html; charset=utf-8"
    assert head["cache-control"] == "no-store"
    assert head["x-content-type-options"] == "nosniff"
    assert head["referrer-policy"] == "no-referrer"
    policy = dict(rule.strip().split(" ", 1) for rule in head["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"('sha256-[\w+/=]+' ?)+", policy["script-src"])
    assert "python" not in head["server"].lower()
    assert "access-control-allow-origin" not in head


def test_head_has_the_headers_only(server):
    page, head = get(server), get(server, method="HEAD")
    assert headers(head) | {"date": ""} == headers(page) | {"date": ""} and head.endswith(b"\r\n\r\n")
    assert get(server, "/events", method="HEAD").endswith(b"\r\n\r\n")


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST:{port}", "127.0.0.1:{port}"])
def test_this_host_is_served(server, host):
    assert status(get(server, host=host.format(port=server.port))) == 200


@pytest.mark.parametrize(
    "host",
    ["example.com", "example.com:{port}", "127.0.0.1", "localhost", "127.0.0.1:1", "127.0.0.1:{port}.example.com",
     "localhost.example.com:{port}", "0.0.0.0:{port}", "[::1]:{port}", "", "127.0.0.1:{port}@example.com",
     "127.0.0.1:{port}, example.com", "127.1:{port}", "\xb9\xb2\xb7.0.0.1:{port}"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/events"])
def test_another_host_is_refused(server, host, path):
    assert status(get(server, path, host.format(port=server.port))) == 403


def test_another_site_may_link_to_the_page_but_not_embed_it(server):
    for site in ("cross-site", "same-site"):
        for path in ("/", "/events"):
            assert status(get(server, path, more=f"Sec-Fetch-Site: {site}\r\nSec-Fetch-Mode: no-cors\r\n")) == 403
        assert status(get(server, more=f"Sec-Fetch-Site: {site}\r\nSec-Fetch-Mode: navigate\r\n")) == 200
    assert status(get(server, "/events", more="Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\n")) == 200


def test_no_host_and_two_hosts_are_refused(server):
    assert status(raw(server, b"GET / HTTP/1.1\r\n\r\n")) == 400
    assert status(raw(server, b"GET / HTTP/1.0\r\n\r\n")) == 400
    assert status(get(server, more=f"Host: 127.0.0.1:{server.port}\r\n")) == 400
    assert b"<" not in raw(server, b"GET /\r\n\r\n")  # HTTP/0.9 has no status


@pytest.mark.parametrize(
    "path",
    ["/..%2f..%2fetc/passwd", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/etc/passwd", "/%00",
     "/run.json%00.html", "/\\..\\..\\etc", "http://example.com/", "http://127.0.0.1/", "file:///etc/passwd", "*",
     "/language-001/run.json", "/outside/secret", "/linked", "/events/", "/events?", "/?x", "/#", "/index.html",
     "/%2e", "/./", "/%", "/\xff"],
)  # fmt: skip
def test_no_path_leads_to_a_file(server, root, path):
    (root.parent / "outside").mkdir()
    (root.parent / "outside" / "secret").write_text("secret")
    (root / "outside").symlink_to(root.parent / "outside")
    (root / "linked").symlink_to(root.parent / "outside" / "secret")
    answer = get(server, path)
    assert status(answer) == 404
    assert b"secret" not in answer and b"root:" not in answer
    assert headers(answer)["content-type"].startswith("text/plain")
    assert headers(answer)["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "BREW"])
@pytest.mark.parametrize("path", ["/", "/events", "/language-001"])
def test_other_methods_are_refused(server, method, path):
    answer = get(server, path, method=method)
    assert status(answer) == 405 and headers(answer)["allow"] == "GET, HEAD"


def test_a_refused_body_does_not_hide_the_answer(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=FETCH_SECONDS)
    connection.request("POST", "/", body=b"x" * 1_000_000)
    assert connection.getresponse().status == 405


def test_a_thread_that_cannot_start_leaves_its_connection_to_others(server, monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(3):
            assert get(server) == b""
    assert server._free._value == module.MAX_CONNECTIONS


def test_a_page_that_cannot_be_renewed_stays_as_it_was(server, root, trained, monkeypatch, capfd):
    page, renders = get(server), []

    def fail(*_: object) -> str:
        renders.append(None)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(rendering.Renderer, "_page", fail)
    (root / "language-001" / "note").write_text("new")
    server.renderer._render_at = 0.0
    for _ in range(3):
        answer = get(server)
        assert status(answer) == 200 and answer.split(b"\r\n\r\n", 1)[1] == page.split(b"\r\n\r\n", 1)[1]
    assert len(renders) == 1
    assert "the page was not renewed: ZeroDivisionError: planted" in capfd.readouterr().err


def test_it_listens_on_this_machine_only(server):
    assert server.socket.getsockname()[0] == "127.0.0.1" and server.socket.family == socket.AF_INET
    for other in ("127.0.0.2", "::1"):
        with pytest.raises(OSError, match=r"refused|assign|unreachable|not supported"):
            socket.create_connection((other, server.port), timeout=2)


# --- Clients that are broken or hostile -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\xff\n\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
     b"\x00" * 99 + b"\n\n", b"GET / HTTP/x\r\n\r\n", b"GET / /  HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost\r\n\r\n",
     b"A" * 999 + b"\n\n",
     b"GET / HTTP/1.1\r\n: x\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", bytes(range(256)) + b"\n\n",
     b"GET / HTTP/1.1\r\nHost: x\r\n\x00\xff: \xff\r\n\r\n"],
)  # fmt: skip
def test_garbage_is_refused(server, request_):
    answer = raw(server, request_)
    assert answer == b"" or answer[:5] != b"HTTP/" or 400 <= status(answer) < 600
    assert b"<" not in answer and status(get(server)) == 200


@pytest.mark.parametrize("line", [b"GET /" + b"a" * 200_000, b"GET / HTTP/1.1\r\nHost: " + b"a" * 200_000])
def test_a_very_long_request_is_refused(server, line):
    assert status(raw(server, line + b" HTTP/1.1\r\n\r\n")) in (414, 431)
    assert status(get(server)) == 200


def drip(connection: socket.socket, seconds: float) -> None:
    """Send a byte now and then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(b"G")
        time.sleep(0.05)


def test_clients_that_are_slow_or_gone_do_not_delay_others(server, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.5)
    get(server)  # renders the page
    address = "127.0.0.1", server.port
    silent = [socket.create_connection(address) for _ in range(20)]
    deaf = [socket.create_connection(address) for _ in range(20)]
    for connection in deaf:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(f"GET / HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n".encode())
    for _ in range(20):  # gone before the answer
        with socket.create_connection(address) as connection:
            connection.sendall(f"GET /events HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n".encode())
    slow = socket.create_connection(address, timeout=FETCH_SECONDS)
    begin = time.monotonic()
    assert status(get(server)) == 200
    assert time.monotonic() - begin < 5
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        drip(slow, 20.0)  # A byte now and then does not extend the time for a request.
    for connection in silent:
        connection.settimeout(FETCH_SECONDS)
        assert connection.recv(1) == b""  # closed
        connection.close()
    for connection in deaf:
        connection.close()


def test_too_many_connections_are_closed_at_once(root, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    with Server(root, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kept = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as refused:
            assert refused.recv(1) == b""
        for connection in kept:
            connection.close()
        server.shutdown()


def test_a_fault_of_ours_is_an_answer_and_one_line(server, monkeypatch, capfd):
    def broken() -> None:
        raise ZeroDivisionError("planted\nlines")

    monkeypatch.setattr(server.renderer, "rendered", broken)
    answer = get(server)
    assert status(answer) == 500 and b"planted" not in answer
    assert capfd.readouterr().err == "subquad: warning: ZeroDivisionError: planted lines\n"


# --- Events -----------------------------------------------------------------------------------------------------------


class Reader:
    """What an EventSource does."""

    def __init__(self, server: Server) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=FETCH_SECONDS)
        self.connection.request("GET", "/events")
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200 and self.answer.headers["Content-Type"] == "text/event-stream"

    def until(self, is_it) -> dict:
        """Return the first message for which a condition holds."""
        while line := self.answer.readline():
            if line.startswith(b"data: ") and is_it(message := json.loads(line[6:])):
                return message
        raise AssertionError("the stream ended")


def test_events_follow_a_run_that_grows_and_one_that_appears(server, trained, trained_once):
    unfinish(trained)
    reader, other = Reader(server), Reader(server)
    for each in (reader, other):
        first = each.until(lambda message: message.get("step") == 4)
        assert (first["run"], first["state"], first["total"]) == ("language-001", "unfinished", 4)
    for step in (5, 6, 7):
        with (trained / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "epoch": step / 59, "loss": 1 / step}) + "\n")
        for each in (reader, other):
            found = each.until(lambda message, step=step: message.get("step") == step)
            assert found["loss"][0][-1] == step and found["figures"]["loss"] == pytest.approx(1 / step, rel=1e-5)
    shutil.copytree(trained_once / "runs" / "language-001", trained.parent / "later")
    assert reader.until(lambda message: message["run"] == "later")["state"] == "finished"
    shutil.rmtree(trained)
    assert other.until(lambda message: message["state"] == "removed")["run"] == "language-001"


# --- Rendering --------------------------------------------------------------------------------------------------------


def test_the_page_is_rendered_once_per_change_and_not_too_often(root, trained, trained_once, monkeypatch):
    count = []
    page = rendering.page
    monkeypatch.setattr(rendering, "page", lambda *given, **named: count.append(1) or page(*given, **named))
    renderer = rendering.Renderer(root)
    first = renderer.rendered()
    monkeypatch.setattr(renderer, "_render_at", 0.0)
    assert renderer.rendered() is first and len(count) == 1
    shutil.copytree(trained_once / "runs" / "language-001", root / "later")
    assert renderer.rendered() is first and len(count) == 1  # too early
    monkeypatch.setattr(renderer, "_render_at", 0.0)
    assert b"later" in renderer.rendered().html and len(count) == 2


def test_parts_that_do_not_depend_on_runs_are_made_once_and_are_those_of_the_report(root, trained, monkeypatch):
    renderer = rendering.Renderer(root)
    first = renderer.rendered()
    fixed = {part.name for part in rendering.PARTS if part.is_fixed}
    assert fixed == {"cost", "head", "needle"}

    def again(*_):
        raise AssertionError("a part was made again")

    monkeypatch.setattr(rendering, "PARTS", [replace(part, data=again, written=again) for part in rendering.PARTS])
    (trained / "metrics.jsonl").touch()
    monkeypatch.setattr(renderer, "_render_at", 0.0)
    second, report = renderer.rendered(), page([Run(trained)]).encode()
    assert second is not first
    for name in fixed:
        data = re.compile(f'id="data-{name}">(.*?)</script>'.encode(), re.DOTALL)
        assert data.search(first.html)[1] == data.search(second.html)[1] == data.search(report)[1] != b""


def test_while_one_request_renders_others_get_the_page_as_it_is(root, monkeypatch):
    renderer = rendering.Renderer(root)
    first = renderer.rendered()
    with renderer._lock:
        assert renderer.rendered() is first


def test_damaged_refused_and_missing_runs_leave_a_page(server, root, trained, monkeypatch):
    assert b"language-001" in get(server)
    renderer = server.renderer
    (trained / "metrics.jsonl").write_text("nonsense\n" * 9)
    monkeypatch.setattr(renderer, "_render_at", 0.0)
    assert b"metrics.jsonl" in get(server)
    (trained / "metrics.jsonl").unlink()
    (root.parent / "outside").write_text('{"step": 1, "classified": 1.0}\n')
    (trained / "metrics.jsonl").symlink_to(root.parent / "outside")
    monkeypatch.setattr(renderer, "_render_at", 0.0)
    answer = get(server)
    assert b"is a symbolic link, which is not followed" in answer and b"classified" not in answer
    shutil.rmtree(trained)
    monkeypatch.setattr(renderer, "_render_at", 0.0)
    assert status(get(server)) == 200


def test_a_hostile_name_is_text(server, root, trained):
    evil = root / "<" / "script><img src=x onerror=alert(1)>"
    evil.parent.mkdir()
    trained.rename(evil)
    page = get(server)
    assert b"onerror=alert(1)" in page and b"<img src=x" not in page and b"</script><img" not in page
