"""Transcripts to spoken clips: resumable, the same each time, and nothing half-written."""

import signal
import subprocess
import sys
import time

import pytest
import soundfile

from small_runs import heed_interrupts
from subquad_lab.cli import main
from subquad_lab.training.run import Run


def write_transcripts(folder, count: int = 8):
    table = folder / "texts.csv"
    table.write_text("".join(f"T-{i}|Number {i}.|number {i}\n" for i in range(count)))
    return table


def test_a_folder_is_synthesized_and_trains(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    table, out = write_transcripts(tmp_path), tmp_path / "spoken"
    assert main(["synthesize", str(table), str(out), "--voices", "en-us,en-gb-x-rp"]) == 0
    assert sorted(path.name for path in (out / "wavs").iterdir()) == [f"T-{i}.wav" for i in range(8)]
    assert soundfile.info(out / "wavs" / "T-3.wav").duration > 0.4
    options = ["--data", str(out), "--steps", "2", "--batch", "2", "--width", "8"]
    assert main(["train", "speech", *options, "--out", str(tmp_path / "runs")]) == 0
    assert Run.open(tmp_path / "runs" / "speech-001").about()["data"]["name"] == "spoken, synthetic"


def test_synthesis_goes_on_where_it_was_and_comes_to_the_same(tmp_path, monkeypatch, capfd):
    from subquad_lab.data.espeak import Speaker

    table = write_transcripts(tmp_path)
    assert main(["synthesize", str(table), str(tmp_path / "whole")]) == 0
    say, said = Speaker.say, []

    def stopped(self, text, **how):
        if len(said) == 4:  # a word of the voice, and three clips
            raise KeyboardInterrupt
        said.append(text)
        return say(self, text, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Speaker, "say", stopped)
        assert main(["synthesize", str(table), str(tmp_path / "parts")]) == 130
    assert len(list((tmp_path / "parts" / "wavs").iterdir())) == 3
    spoken = []
    monkeypatch.setattr(Speaker, "say", lambda self, text, **how: spoken.append(text) or say(self, text, **how))
    assert main(["synthesize", str(table), str(tmp_path / "parts")]) == 0
    assert len(spoken) == 1 + 5
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "parts" / path.relative_to(tmp_path / "whole")).read_bytes()


def test_a_folder_may_grow_but_not_change(tmp_path, capfd):
    table, out = write_transcripts(tmp_path), str(tmp_path / "spoken")
    assert main(["synthesize", str(table), out, "--clips", "2"]) == 0
    assert main(["synthesize", str(table), out, "--clips", "3"]) == 0
    assert len(list((tmp_path / "spoken" / "wavs").iterdir())) == 3
    capfd.readouterr()
    assert main(["synthesize", str(table), out, "--voices", "en-gb-x-rp"]) == 2
    assert "was made with other voices" in capfd.readouterr().err
    assert main(["synthesize", str(table), out, "--clips", "2"]) == 2
    said = capfd.readouterr().err
    assert "holds 3 clips, 1 of which are not requested now (such as T-2); use at least as many --clips" in said
    table.write_text(table.read_text().replace("number 1", "number one"))
    assert main(["synthesize", str(table), out]) == 2
    said = capfd.readouterr().err
    assert "was made from other texts: expected 'number one' for T-1, got 'number 1'" in said
    (tmp_path / "other" / "wavs").mkdir(parents=True)
    (tmp_path / "other" / "wavs" / "mine.wav").write_text("mine")
    assert main(["synthesize", str(table), str(tmp_path / "other")]) == 2
    assert "holds other files" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "other").rglob("*")] == ["wavs", "mine.wav"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_synthesis_with_what_is_made_and_says_how_to_go_on(tmp_path, number):
    table, out = write_transcripts(tmp_path, 5000), tmp_path / "out"
    command = [sys.executable, "-m", "subquad_lab", "synthesize", str(table), str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts) as process:
        deadline = time.monotonic() + 60
        while len(list(out.glob("wavs/T*"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        errors = process.stderr.read()
    assert process.returncode == 128 + number
    name = signal.Signals(number).name
    assert f"interrupted by {name}. Progress saved. Resume by running the same command again" in errors
    listed = [line.partition("|")[0] for line in (out / "metadata.csv").read_text().splitlines()]
    assert 3 <= len(listed) < 5000
    assert sorted(path.stem for path in (out / "wavs").iterdir()) == sorted(listed)


def test_what_a_killed_process_has_begun_is_removed(tmp_path):
    table, out = write_transcripts(tmp_path), tmp_path / "out"
    assert main(["synthesize", str(table), str(out), "--clips", "2"]) == 0
    for name in ("wavs/.T-2.wav.0123456789abcdef", ".metadata.csv.0123456789abcdef"):
        (out / name).write_bytes(b"half")
    (out / ".mine").write_text("mine")
    assert main(["synthesize", str(table), str(out), "--clips", "3"]) == 0
    assert {path.name for path in out.iterdir()} == {"metadata.csv", "synthesis.json", "wavs", ".mine"}
    assert {path.name for path in (out / "wavs").iterdir()} == {"T-0.wav", "T-1.wav", "T-2.wav"}


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", [], "has no usable line: expected id|text|normalized text"),
        ("no bars\n", [], "has no usable line: texts.csv, line 1: expected id|text|normalized text"),
        (
            "../evil|b\n",
            [],
            "line 1: expected an id of 1 to 200 letters, digits, underscores, dots or dashes, got '../evil'",
        ),
        ("a 9|b\n", [], "dots or dashes, got 'a 9'"),
        (f"{'x' * 300}|b\n", [], f"got '{'x' * 40}... (300 characters)'"),
        ("a|b\n", ["--voices", "en-gb"], "no voice 'en-gb'; expected one of en, en-029, en-gb-scotland, en-gb-x-"),
        ("a|b\n", ["--voices", "xx"], ", and 129 more, or a variant such as en-us+f4"),
        ("a|b\n", ["--clips", "0"], "--clips: expected a positive integer, got 0"),
        ("a|b\n", ["--voices", "en-us,nobody"], "--voices: espeak-ng has no voice 'nobody'"),
        ("a|b\n", ["--voices", "en-us,"], "--voices: espeak-ng has no voice ''"),
    ],
)
def test_what_cannot_be_synthesized_is_said(tmp_path, capfd, content, options, message):
    table = tmp_path / "texts.csv"
    table.write_text(content)
    assert main(["synthesize", str(table), str(tmp_path / "out"), *options]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()  # A second try may say it right.


def test_lines_that_cannot_be_spoken_are_named_and_counted(tmp_path, capfd):
    table = tmp_path / "texts.csv"
    table.write_text("a|One.|one\n\nno bars\na|two|two\nb|...|...\nc||\nd|two|two\n")
    assert main(["synthesize", str(table), str(tmp_path / "out"), "--voices", "en-us, en-gb-x-rp"]) == 0
    said = capfd.readouterr()
    assert "2 clips, 4 skipped" in said.out
    assert "texts.csv, line 3: expected id|text|normalized text" in said.err
    assert "texts.csv, line 4: duplicate id a" in said.err
    assert "b: nothing to pronounce in '...'" in said.err
    assert "c: the text is empty" in said.err
    assert {path.name for path in (tmp_path / "out" / "wavs").iterdir()} == {"a.wav", "d.wav"}
    assert (tmp_path / "out" / "metadata.csv").read_text() == "a|One.|one\nd|two|two\n"
    assert main(["synthesize", str(table), str(tmp_path / "out"), "--voices", "en-us, en-gb-x-rp"]) == 0  # once more
    assert "2 clips, 4 skipped" in capfd.readouterr().out


def test_a_text_that_cannot_be_spoken_is_named_and_the_others_are(tmp_path, capfd, monkeypatch):
    from subquad_lab.data.espeak import Speaker

    say = Speaker.say

    def fails(self, text, **how):
        if text == "number 3":
            raise ValueError("espeak-ng cannot synthesize this")
        return say(self, text, **how)

    monkeypatch.setattr(Speaker, "say", fails)
    assert main(["synthesize", str(write_transcripts(tmp_path)), str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out" / "wavs").iterdir())) == 7
    said = capfd.readouterr()
    assert "T-3: espeak-ng cannot synthesize this" in said.err
    assert "7 clips" in said.out
