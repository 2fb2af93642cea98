"""Sound files of all kinds, and features that equal those of another implementation."""

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from small_runs import tone
from subquad_lab.data.sound import MELS, RATE, log_mel, mel_bank, read_sound


def theirs(samples: np.ndarray, rate: int) -> np.ndarray:
    """The features as transformers computes them, but for the last frame, which ours leave out."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    bank = mel_filter_bank(201, MELS, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    logs = spectrogram(samples, window_function(400, "hann"), 400, 160, power=2.0, mel_filters=bank, log_mel="log10",
                       mel_floor=1e-10)[:, : len(samples) // 160]  # fmt: skip
    return ((np.maximum(logs, logs.max() - 8) + 4) / 4).T


@pytest.mark.parametrize("rate", [16_000, 22_050])
def test_features_equal_those_of_transformers(rate):
    draw = np.random.default_rng(0)
    sounds = [draw.normal(size=16_000) * 0.1, tone(440, 1.3, rate) + draw.normal(size=int(1.3 * rate)) * 1e-3,
              np.cumsum(draw.normal(size=5_001)) * 1e-3]  # fmt: skip
    for sound in sounds:
        ours = log_mel(torch.from_numpy(sound.astype(np.float32)), rate).numpy()
        assert ours.shape == (len(sound) // 160, MELS)
        assert np.abs(ours - theirs(sound.astype(np.float32), rate)).max() < 1e-4


def test_the_mel_bank_is_that_of_transformers():
    from transformers.audio_utils import mel_filter_bank

    for rate in (8_000, 16_000, 22_050, 48_000):
        bank = mel_filter_bank(201, MELS, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
        assert np.abs(mel_bank(rate).numpy() - bank.T).max() < 1e-6


def test_a_tone_is_loudest_in_its_own_mel():
    features = log_mel(torch.from_numpy(tone(1000, 0.5, RATE)))
    loudest = features[5:-5].mean(0).argmax()
    assert mel_bank(RATE)[loudest].argmax() == 1000 / (RATE / 400)
    assert features.max() - features.min() <= 2.0 + 1e-6  # eight powers of ten, by four


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 48_000])
@pytest.mark.parametrize("kind", ["wav", "flac"])
@pytest.mark.parametrize("channels", [1, 2])
def test_any_rate_kind_and_number_of_channels(tmp_path, rate, kind, channels):
    path = tmp_path / f"a.{kind}"
    soundfile.write(path, np.stack([tone(440, 0.5, rate)] * channels, 1), rate)
    samples = read_sound(path)
    assert samples.shape == (RATE // 2,)
    inner = slice(1000, -1000)  # away from the ends, where a filter sees nothing on one side
    assert np.abs(samples.numpy() - tone(440, 0.5, RATE))[inner].max() < 2e-3
    assert len(read_sound(path, None)) == rate // 2  # as it is


def test_channels_are_averaged(tmp_path):
    both = np.stack([tone(300, 0.1, RATE), tone(700, 0.1, RATE)], 1)
    soundfile.write(tmp_path / "a.wav", both, RATE, subtype="FLOAT")
    assert np.allclose(read_sound(tmp_path / "a.wav"), both.mean(1))


def test_a_higher_rate_leaves_no_false_tones(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(15_000, 0.5, 48_000), 48_000)
    assert read_sound(tmp_path / "a.wav")[1000:-1000].abs().max() < 0.01


def wrong_files() -> dict[str, tuple[bytes, str]]:
    """What is in a file, and what is said of it."""
    import io

    whole = {}
    for kind in ("wav", "flac"):
        file = io.BytesIO()
        soundfile.write(file, tone(300, 1.0, 8000), 8000, format=kind)
        whole[kind] = file.getvalue()
    odd = io.BytesIO()
    soundfile.write(odd, np.array([0.0, np.nan] * 500, np.float32), 8000, format="wav", subtype="FLOAT")
    short = io.BytesIO()
    soundfile.write(short, tone(300, 0.01, 8000), 8000, format="wav")
    head, fast = bytearray(whole["wav"]), bytearray(whole["wav"])
    head[24:28], fast[24:28] = (1).to_bytes(4, "little"), (2**31 - 1).to_bytes(4, "little")
    forged = bytearray(whole["flac"])
    forged[21] |= 0x0F  # the highest bits of the number of samples
    forged[22:26] = b"\xff" * 4
    return {
        "one sample in a second": (bytes(head), "expected a sample rate of 4,000 to 384,000 Hz, got 1 Hz"),
        "too many in a second": (bytes(fast), "got 2,147,483,647 Hz"),
        "a flac that promises too much": (bytes(forged), "expected at most|truncated|not a valid audio file"),
        "empty": (b"", "the file is empty"),
        "text": (b"this is no sound at all, but text" * 10, "not a valid audio file"),
        "cut off": (whole["wav"][:9000], "the file is truncated"),
        "only a head": (whole["wav"][:44], "the file is truncated"),
        "half a head": (whole["wav"][:20], "the file is truncated"),
        "a cut flac": (whole["flac"][: len(whole["flac"]) // 2], "truncated|not a valid audio file"),
        "not numbers": (odd.getvalue(), "expected finite samples"),
        "too short": (short.getvalue(), "expected at least 201 samples, got 80"),
    }


@pytest.mark.parametrize("what", wrong_files())
def test_what_cannot_be_read_is_named(tmp_path, what):
    content, message = wrong_files()[what]
    path = tmp_path / f"{what}.wav"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{what}.wav: .*({message})"):
        read_sound(path)


def test_a_file_shorter_than_it_promises_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.flac"
    soundfile.write(path, tone(300, 3.0, 8000), 8000)
    read = soundfile.SoundFile.read
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda self, *a, **k: read(self, *a, **k)[:100] if self.tell() == 0
                        else read(self, *a, **k)[:0])  # fmt: skip
    with pytest.raises(ValueError, match=r"a.flac: the file is truncated: expected 24,000 samples, got 100"):
        read_sound(path)


def test_a_head_that_counts_itself_is_whole(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(300, 0.5, 8000), 8000)
    content = bytearray(path.read_bytes())
    content[4:8] = len(content).to_bytes(4, "little")
    path.write_bytes(content)
    assert len(read_sound(path)) == RATE // 2


def test_sound_too_loud_for_its_features_is_refused():
    with pytest.raises(ValueError, match="is too loud"):
        log_mel(1e25 * torch.from_numpy(tone(300, 0.5, RATE)))


def test_folders_and_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="expected a regular file, got a folder"):
        read_sound(tmp_path)
    with pytest.raises(ValueError, match="No such file"):
        read_sound(tmp_path / "a.wav")
    with pytest.raises(ValueError, match="null: expected a regular file, got a device"):
        read_sound(Path("/dev/null"))


def test_hours_are_refused_before_they_are_read(tmp_path, monkeypatch):
    from subquad_lab.data import sound

    soundfile.write(tmp_path / "a.wav", tone(300, 3.0, 8000), 8000)
    monkeypatch.setattr(sound, "MAX_FILE_SECONDS", 2)
    with pytest.raises(ValueError, match="expected at most 0 h"):
        read_sound(tmp_path / "a.wav")


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    return name + (len(content) if size is None else size).to_bytes(4, "little") + content


def wav(channels: int = 1, rate: int = 16_000, bits: int = 16, kind: int = 1, data: int | None = None) -> bytes:
    """A wav file with a header of one's own choice, and 1,000 samples of 16 bits."""
    numbers = ((kind, 2), (channels, 2), (rate, 4), (rate * channels * bits // 8 % 2**32, 4), (channels * bits // 8, 2),
               (bits, 2))  # fmt: skip
    head = b"".join((number % 256**size).to_bytes(size, "little") for number, size in numbers)
    return chunk(b"RIFF", b"WAVE" + chunk(b"fmt ", head) + chunk(b"data", bytes(range(250)) * 8, data))


@pytest.mark.parametrize(
    "content",
    [
        wav(channels=0), wav(channels=60_000), wav(rate=0), wav(rate=2**32 - 1), wav(bits=0), wav(bits=7_777),
        wav(kind=0), wav(kind=999), wav(data=0), wav(channels=1024, bits=64, kind=3), b"RIFF", wav()[:20], wav()[:-100],
        wav().replace(b"fmt ", b"FMT "), wav().replace(b"WAVE", b"AVI "), chunk(b"RIFF", b"WAVE" + b"\xff" * 2000),
        chunk(b"RIFF", b"WAVE" + chunk(b"fmt ", b"", 2**32 - 1)), b"fLaC" + b"\xff" * 500, b"OggS" + b"\0" * 500,
        b"ID3\x03\0\0\x7f\x7f\x7f\x7f" + bytes(500), b"FORM\xff\xff\xff\xffAIFF" + b"\xff" * 500, bytes(5000),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_one_error_that_names_the_file(content, tmp_path):
    (tmp_path / "x.wav").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.wav: "):
        read_sound(tmp_path / "x.wav")


def test_the_wav_files_of_these_tests_are_valid_without_a_lie(tmp_path):
    (tmp_path / "x.wav").write_bytes(wav())
    assert len(read_sound(tmp_path / "x.wav")) == 1000


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.wav")
    with pytest.raises(ValueError, match=r"x\.wav: expected a regular file, got a named pipe"):
        read_sound(tmp_path / "x.wav")
