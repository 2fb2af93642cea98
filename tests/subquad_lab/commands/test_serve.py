"""`subquad serve`: errors in one line, and the command as a process."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from small_runs import heed_interrupts


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_out_of_range_is_refused(port, tmp_path, complaint):
    line = complaint(["serve", "--root", str(tmp_path), "--port", port])
    assert f"--port: expected an integer from 0 to 65535, got {port}" in line


def test_a_port_in_use_is_refused(tmp_path, complaint):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = complaint(["serve", "--root", str(tmp_path), "--port", str(port)])
    assert f"--port: cannot listen on 127.0.0.1:{port}: Address already in use; choose another port" in line


def test_without_a_folder_of_runs_it_is_refused(tmp_path, monkeypatch, complaint):
    monkeypatch.chdir(tmp_path)
    assert "--root: no such folder: runs; start a run with `subquad train EXPERIMENT`" in complaint(["serve"])
    (tmp_path / "runs").write_text("")
    assert "--root: expected a folder, got the file runs" in complaint(["serve"])
    assert "--root: expected a value, got ''" in complaint(["serve", "--root", ""])


def listeners(port: int) -> list[str]:
    """Return the addresses that listen on a port, from the kernel's tables, in hexadecimal."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and int(line[1].split(":")[1], 16) == port]


# `subquad` where the thread that accepts a reader is still busy with him when he already has the first bytes.
SLOW_TO_ACCEPT = """
import sys, time
from subquad_lab.cli import main
from subquad_lab.report.live.server import Server
accept = Server.process_request
Server.process_request = lambda *given: (accept(*given), time.sleep(1))
sys.exit(main())
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs the tables of Linux")
def test_the_process_prints_its_address_listens_locally_and_ends_with_ctrl_c(trained):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_ACCEPT, "serve", "--port", "0", "--root", str(trained.parent)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts,
    )  # fmt: skip
    try:
        address = re.fullmatch(r"http://127\.0\.0\.1:(\d+)\n", process.stdout.readline())
        assert process.stdout.readline().endswith("read-only, for this machine only. Stop with Ctrl-C.\n")
        assert listeners(int(address[1])) == ["0100007F"]
        threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {min(19, os.getpriority(0, 0) + 10)}
        with urllib.request.urlopen(address[0].strip(), timeout=60) as page:
            assert b"language-001" in page.read()
        with urllib.request.urlopen(f"{address[0].strip()}/events", timeout=60):  # a reader does not keep it alive
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (130, "", "subquad: interrupted\n")
    finally:
        process.kill()
        process.wait()
