"""Files to texts: neither volume nor silence is heard, and what cannot be heard is named."""

import json
import re
import shutil

import numpy as np
import pytest
import soundfile

from small_runs import reseal, tone
from subquad_lab.cli import main
from subquad_lab.data.sound import read_sound
from subquad_lab.data.speech import characters
from subquad_lab.data.utterances import Usual, heard, usual
from subquad_lab.experiments import speech
from subquad_lab.experiments.speech import side_by_side, spelled
from subquad_lab.experiments.stored import trained
from subquad_lab.training.run import Run


def test_transcribing_files(speech_run, digits, tmp_path, capfd):
    clip = np.concatenate([tone(300 + 150 * digit, 0.06, 8000) for digit in (1, 2, 3)])
    soundfile.write(tmp_path / "clip.wav", clip, 8000)
    soundfile.write(tmp_path / "long.flac", np.concatenate([clip, np.zeros(2000)] * 8), 8000)
    assert main(["transcribe", str(speech_run), str(tmp_path / "clip.wav"), str(tmp_path / "long.flac")]) == 0
    first, *others = capfd.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path / 'clip.wav'}: ")
    spans = [re.fullmatch(rf"{tmp_path / 'long.flac'} ([\d.]+)-([\d.]+) s: (.*)", line).groups() for line in others]
    assert [float(begin) for begin, _, _ in spans] == pytest.approx([i * 0.43 for i in range(8)], abs=0.06)
    assert [float(end) for _, end, _ in spans] == pytest.approx([i * 0.43 + 0.18 for i in range(8)], abs=0.06)
    _, task = trained(speech_run)
    data = Run.open(speech_run).about()["data"]
    assert data["usual"] == usual(task.clips.train)._asdict()
    for beams in (1, 4):
        capfd.readouterr()
        assert main(["transcribe", str(speech_run), str(tmp_path / "clip.wav"), "--beams", str(beams)]) == 0
        ((_, _, clip),) = heard(read_sound(tmp_path / "clip.wav"), Usual(**data["usual"]), data["longest"])
        wanted = spelled(task.config, task.model, *side_by_side(task.config, [clip]), beams)[0]
        assert capfd.readouterr().out == f"{tmp_path / 'clip.wav'}: {speech.text_of(wanted)}\n"
    part = task.clips.test
    text = speech.text_of(spelled(task.config, task.model, *side_by_side(task.config, [part[0]]))[0])
    assert json.loads((speech_run / "looks.json").read_text())["clips"][0]["given"] == text


def test_the_model_hears_neither_volume_nor_silence(speech_run, tmp_path, monkeypatch):
    clip, seen = np.concatenate([tone(300 + 150 * digit, 0.06, 16_000) for digit in (4, 0, 9, 2)]), []
    monkeypatch.setattr(
        "subquad_lab.commands.transcribe.spelled", lambda _, __, frames, *___: seen.append(frames) or [[]]
    )
    for name, sound in {"a": clip, "b": 0.01 * clip, "c": 1000 * clip, "d": np.pad(clip, (5_000, 20_000))}.items():
        soundfile.write(tmp_path / f"{name}.wav", sound, 16_000, subtype="FLOAT")
        assert main(["transcribe", str(speech_run), str(tmp_path / f"{name}.wav")]) == 0
    first, *others = seen
    assert all(frames.shape == first.shape and (frames - first).abs().max() < 2e-3 for frames in others)


def test_a_text_that_the_limit_cuts_is_said(speech_run, tmp_path, capfd, monkeypatch):
    soundfile.write(tmp_path / "clip.wav", tone(400, 0.3, 8000), 8000)
    for length, is_said in ((20, True), (19, False)):
        monkeypatch.setattr("subquad_lab.commands.transcribe.spelled", lambda *_, n=length: [characters("s" * n)])
        assert main(["transcribe", str(speech_run), str(tmp_path / "clip.wav")]) == 0
        assert ("clip.wav: cut after 20 characters, the limit of this run" in
                capfd.readouterr().err) == is_said  # fmt: skip


def test_an_early_run_asks_its_data_what_clips_usually_have(speech_run, tmp_path, capfd):
    soundfile.write(tmp_path / "clip.wav", tone(400, 0.3, 8000), 8000)
    command = ["transcribe", str(speech_run), str(tmp_path / "clip.wav")]
    assert main(command) == 0
    now, about = capfd.readouterr().out, json.loads((speech_run / "run.json").read_text())
    usual = about["data"].pop("usual")
    (speech_run / "run.json").write_text(json.dumps(about))
    reseal(speech_run)
    assert main(command) == 0
    assert capfd.readouterr().out == now
    for wrong in (7, {"loudness": 1.0}, usual | {"before": "2"}, usual | {"after": 10**12}):
        (speech_run / "run.json").write_text(json.dumps(about | {"data": about["data"] | {"usual": wrong}}))
        reseal(speech_run)
        assert main(command) == 2
        assert "run.json: expected the numbers loudness, before, after, between" in capfd.readouterr().err


def test_transcribing_needs_no_training_data(speech_run, digits, tmp_path, capfd):
    soundfile.write(tmp_path / "clip.wav", tone(400, 0.3, 8000), 8000)
    shutil.rmtree(digits)
    assert not (tmp_path / "cache").exists()
    assert main(["transcribe", str(speech_run), str(tmp_path / "clip.wav")]) == 0
    assert capfd.readouterr().out


def test_files_that_cannot_be_heard_are_named_and_the_others_are_heard(speech_run, tmp_path, capfd):
    soundfile.write(tmp_path / "clip.wav", tone(400, 0.3, 8000), 8000)
    soundfile.write(tmp_path / "silent.wav", np.zeros(8000), 8000)
    soundfile.write(tmp_path / "loud.wav", 1e25 * tone(400, 0.3, 8000), 8000, subtype="FLOAT")
    (tmp_path / "empty.wav").write_bytes(b"")
    files = [str(tmp_path / f"{name}.wav") for name in ("silent", "empty", "none", "clip", "loud")]
    assert main(["transcribe", str(speech_run), *files]) == 2
    said = capfd.readouterr()
    assert said.out.startswith(f"{files[3]}: ")
    for file, why in zip(files, ("the recording is silent", "the file is empty", "No such file"), strict=False):
        assert f"{file}: {why}" in said.err
    assert f"{files[4]}: " in said.out  # However loud, it is heard.
    assert "subquad: error: FILES: 3 of 5 files cannot be used\n" in said.err
    for beams in ("0", "101"):
        assert main(["transcribe", str(speech_run), files[3], "--beams", beams]) == 2
        assert f"--beams: expected an integer from 1 to 100, got {beams}" in capfd.readouterr().err


def test_only_a_speech_model_hears(tmp_path, text, capfd):
    assert main(["train", "language", "--data", str(text), "--steps", "1", "--batch", "2", "--context", "4",
                 "--width", "8", "--embedding", "8", "--out", str(tmp_path / "runs")]) == 0  # fmt: skip
    assert main(["transcribe", str(tmp_path / "runs" / "language-001"), "a.wav"]) == 2
    assert "RUN: expected a run of a speech model, got " in capfd.readouterr().err
