"""How a run is watched: a bar on a terminal, lines in a log, nothing where it is told so."""

import os
import pty
import subprocess
import sys

from subquad_lab.training.progress import Display


def test_a_log_has_lines(capfd, monkeypatch):
    monkeypatch.setattr("subquad_lab.training.progress.LINE_SECONDS", 1000.0)
    with Display("language") as display:
        display.begin()
        for step in (1, 2):
            display.step(step, step / 10, 3.21, 1234.5, "words")
        display.evaluated(2, {"perplexity": 24.5}, "perplexity 24.5, step 2", False)
        display.evaluated(3, {"perplexity": 24.4}, "perplexity 24.4, step 3", False)  # faster than one reads
        display.evaluated(4, {"perplexity": 24.6}, "perplexity 24.4, step 3", True)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "language  step 1  loss 3.210  1,234 words/s  10%",  # the next one would come after LINE_SECONDS
        "language  step 2  validation: perplexity 24.5  (best so far: perplexity 24.5, step 2)",
        "language  step 4  validation: perplexity 24.6  (best so far: perplexity 24.4, step 3)",
    ]


def test_a_silent_display_says_nothing(capfd):
    with Display("language", silent=True) as display:
        display.begin()
        display.step(1, 0.1, 3.2, 1.0, "words")
        display.evaluated(1, {"perplexity": 1.0}, "perplexity 1.0, step 1", True)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_has_a_bar_with_loss_speed_and_time_left(text, tmp_path):
    ours, theirs = pty.openpty()
    fields = {"data": text, "out": tmp_path, "model": "rnn", "embedding": 6, "width": 8, "context": 5, "batch": 4}
    options = [f"--{key}={value}" for key, value in fields.items()]
    command = [sys.executable, "-m", "subquad_lab", "train", "language", *options, "--steps=300"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "150"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # The other side is closed: Linux has an error for that.
                break
            if not part:
                break
            shown += part
    os.close(ours)
    assert process.returncode == 0
    for piece in (b"loss", b"words/s", b"remaining", b"%", b"\x1b["):
        assert piece in shown
