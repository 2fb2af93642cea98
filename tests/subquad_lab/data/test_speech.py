"""Clips from three kinds of places: parts share nothing, what is left out is named, and the cache is not trusted."""

import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from small_runs import tone, write_digits
from subquad.planning.calibration_file import cache_folder
from subquad_lab import UsageError
from subquad_lab.data import clips as features
from subquad_lab.data.sound import log_mel, read_sound
from subquad_lab.data.speech import ALPHABET, DIGITS, UNKNOWN, characters, in_words, load_speech, text_of

REAL = Path(os.environ.get("SUBQUAD_DATA", "no data"))


pytestmark = pytest.mark.usefixtures("own_cache")


def write_table(folder: Path, lines: int = 20) -> Path:
    """A folder like LJSpeech's."""
    (folder / "wavs").mkdir(parents=True)
    for i in range(lines):
        soundfile.write(folder / "wavs" / f"C{i:02}.wav", tone(200 + 30 * i, 0.1 + 0.01 * i, 22_050), 22_050)
    (folder / "metadata.csv").write_text("".join(f"C{i:02}|Text {i}|text {in_words(i)}\n" for i in range(lines)))
    return folder


# --- Texts --------------------------------------------------------------------------------------------------------


def test_the_alphabet_has_35_characters_of_which_four_are_marks():
    assert len(ALPHABET) + 4 == 35
    assert text_of(characters(ALPHABET)) == ALPHABET
    assert characters("Ab;") == [*characters("ab"), UNKNOWN]
    assert text_of(characters("a\u00e9b")) == "a#b"


def test_numbers_in_words_are_all_different():
    words = [in_words(number) for number in range(10_000)]
    assert len(set(words)) == 10_000
    assert set("".join(words)) <= set(ALPHABET)
    assert in_words(1_100) == "one thousand one hundred"
    assert in_words(9_999) == "nine thousand nine hundred and ninety nine"


# --- Spoken numbers -----------------------------------------------------------------------------------------------


def test_numbers_can_be_heard_at_their_own_rate():
    own, resampled = (load_speech(None, clips=24, resample=resample) for resample in (False, True))
    assert own.train.lengths.sum() / resampled.train.lengths.sum() == pytest.approx(22_050 / 16_000, rel=0.01)


def test_spoken_numbers_are_in_one_part_alone_and_the_same_each_time():
    found = load_speech(None, clips=48)
    assert found.name == "spoken numbers, synthetic"
    assert [len(part) for part in (found.train, found.valid, found.test)] == [40, 4, 4]
    texts = [*found.train.texts, *found.valid.texts, *found.test.texts]
    assert len(set(texts)) == 48
    shutil.rmtree(cache_folder())
    again = load_speech(None, clips=48)
    assert torch.equal(again.train.frames, found.train.frames)
    assert again.checksum == found.checksum


@pytest.mark.parametrize("clips", [0, 23, 10_001])
def test_a_number_of_clips_that_cannot_be_is_refused(clips):
    with pytest.raises(UsageError, match=f"clips: expected 24 to 10,000 spoken numbers, got {clips:,}"):
        load_speech(None, clips=clips)


# --- A table of transcripts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", [".", "LJSpeech-1.1"])
def test_a_folder_like_that_of_ljspeech(tmp_path, below):
    folder = write_table(tmp_path / "data" / below)
    found = load_speech(str(tmp_path / "data"))
    assert [len(part) for part in (found.train, found.valid, found.test)] == [15, 1, 4]
    assert found.valid.names == ["C15"]
    assert found.train.texts[3] == "text three"  # the normalized one
    wanted = log_mel(read_sound(folder / "wavs" / "C03.wav"))
    assert torch.equal(found.train[3], wanted.half().float())
    assert len(load_speech(str(tmp_path / "data"), clips=8).train) == 6


def test_the_published_split(tmp_path, monkeypatch):
    (tmp_path / "metadata.csv").write_text("".join(f"C{i}|a|a\n" for i in range(13_100)))
    seen = {}
    monkeypatch.setattr("subquad_lab.data.speech.featured", lambda name, parts, how: seen.update(parts))
    load_speech(str(tmp_path))
    assert [(seen[part][0].name, seen[part][-1].name) for part in ("train", "valid", "test")] == [
        ("C0", "C9824"), ("C9825", "C10479"), ("C10480", "C13099")
    ]  # fmt: skip


@pytest.mark.parametrize("lines", [0, 1, 4])
def test_a_table_with_too_few_lines_is_refused(tmp_path, lines):
    folder = write_table(tmp_path / "data", lines)
    with pytest.raises(UsageError, match=f"expected at least 5 lines in .*metadata.csv, got {lines}"):
        load_speech(str(folder))


@pytest.mark.parametrize("clips", [0, 11, 100_001])
def test_too_few_or_too_many_strings_are_refused(tmp_path, clips):
    with pytest.raises(UsageError, match=f"clips: expected 12 to 100,000 strings of digits, got {clips:,}"):
        load_speech(str(write_digits(tmp_path / "digits")), clips=clips)


def test_an_hour_is_no_clip(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "MAX_CLIP_SECONDS", 0.28)
    with pytest.warns(UserWarning, match=r"C19: expected at most 0.28 s, got 0 s"):
        found = load_speech(str(write_table(tmp_path / "data")))
    assert len(found.skipped) == 1


def test_without_resampling_sound_is_taken_as_it_is(tmp_path):
    write_table(tmp_path / "data")
    assert load_speech(str(tmp_path / "data")).train.lengths[0] == 10
    assert load_speech(str(tmp_path / "data"), resample=False).train.lengths[0] == 2205 // 160


def test_flac_files_do_as_well(tmp_path):
    folder = write_table(tmp_path / "data")
    soundfile.write(folder / "wavs" / "C01.flac", tone(300, 0.2, 48_000), 48_000)
    (folder / "wavs" / "C01.wav").unlink()
    assert load_speech(str(folder)).train.lengths[1] == 20


def test_what_cannot_be_used_is_left_out_named_and_counted(tmp_path):
    folder = write_table(tmp_path / "data")
    wavs = folder / "wavs"
    (wavs / "C00.wav").unlink()
    (wavs / "C01.wav").write_bytes(b"")
    (wavs / "C02.wav").write_bytes((wavs / "C02.wav").read_bytes()[:2000])
    soundfile.write(wavs / "C03.wav", np.zeros(8000), 8000)
    (wavs / "C04.wav").write_text("no sound")
    lines = (folder / "metadata.csv").read_text().splitlines()
    soundfile.write(wavs / "C08.wav", 1e25 * tone(300, 0.2, 8000), 8000, subtype="FLOAT")
    lines[5], lines[6], lines[7], lines[9] = "C05||", "no bars at all", "../C07|up|up", "C10|before it|comes"
    (folder / "metadata.csv").write_text("\n" + "\n".join(lines))
    with pytest.warns(UserWarning, match=r"skipped 10 of 20 clips of data: C00: .* No such file.*; .*; and 7 more"):
        found = load_speech(str(folder))
    reasons = ["No such file", "is empty", "the file is truncated", "is silent", "not a valid audio file",
               "the text is empty", "line 8: expected id", "line 9: expected an id", "is too loud",
               "line 12: duplicate id C10"]  # fmt: skip
    assert len(found.skipped) == 10
    assert all(reason in line for reason, line in zip(reasons, found.skipped, strict=True))
    assert found.train.names == [f"C{i:02}" for i in range(10, 15)]
    with pytest.warns(UserWarning, match="10 of 20"):
        assert load_speech(str(folder)).skipped == found.skipped  # from the cache as well


def test_a_part_without_clips_is_refused(tmp_path):
    folder = write_table(tmp_path / "data")
    (folder / "wavs" / "C15.wav").unlink()
    with pytest.raises(UsageError, match=r"the valid part of data has no usable clips: C15: .*No such file"):
        load_speech(str(folder))


def test_a_table_that_is_no_text_is_named(tmp_path):
    folder = write_table(tmp_path / "data")
    (folder / "metadata.csv").write_bytes(b"C00|caf\xe9|caf\xe9\n")
    with pytest.raises(UsageError, match=r"metadata.csv is not UTF-8: byte 7 is 0xe9"):
        load_speech(str(folder))


def test_folders_that_hold_neither_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"expected metadata.csv or files like"):
        load_speech(str(tmp_path))
    with pytest.raises(UsageError, match="no such folder"):
        load_speech(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="expected a folder, got the file"):
        load_speech(str(tmp_path / "file"))


# --- Spoken digits ------------------------------------------------------------------------------------------------


def sources(folder: Path, monkeypatch: pytest.MonkeyPatch, split: str) -> dict[str, list[tuple[str, list[str]]]]:
    """What is said and the files of each clip, by part."""
    seen = {}

    def record(name, parts, how):
        seen.update({part: [(u.text, [file.stem for file in u.files]) for u in us] for part, us in parts.items()})
        return features.featured(name, parts, how)

    monkeypatch.setattr("subquad_lab.data.speech.featured", record)
    load_speech(str(folder), split, clips=120)
    return seen


@pytest.mark.parametrize("split", ["index", "speaker"])
def test_digits_are_split_before_they_are_joined(tmp_path, monkeypatch, split):
    found = sources(write_digits(tmp_path / "digits"), monkeypatch, split)
    assert {part: len(clips) for part, clips in found.items()} == {"train": 100, "valid": 10, "test": 10}
    files = {part: {file for _, names in clips for file in names} for part, clips in found.items()}
    assert not files["train"] & files["valid"]
    assert not files["train"] & files["test"]
    assert not files["valid"] & files["test"]
    for clips in found.values():
        for text, names in clips:
            assert 3 <= len(names) <= 6
            assert text == " ".join(DIGITS[int(name[0])] for name in names)
            assert len({name.split("_")[1] for name in names}) == 1  # of one speaker
    where = 2 if split == "index" else 1
    assert {name.split("_")[where] for name in files["test"]} == ({"0", "4"} if split == "index" else {"cid"})
    assert {name.split("_")[where] for name in files["valid"]} == ({"5", "9"} if split == "index" else {"bob"})
    assert {name.split("_")[where] for name in files["train"]} == ({"10"} if split == "index" else {"ann"})


def test_strings_are_their_digits_one_after_another(tmp_path):
    found = load_speech(str(write_digits(tmp_path / "digits")), clips=36)
    for text, length in zip(found.train.texts, found.train.lengths.tolist(), strict=True):
        count = len(text.split())
        assert 100 * count * (0.06 + 0.02) - 1 <= length <= 100 * count * (0.06 + 0.12) + 1


def test_too_few_speakers_are_refused(tmp_path):
    folder = write_digits(tmp_path / "digits", ("ann", "bob"))
    with pytest.raises(UsageError, match="split: expected at least 3 speakers, got ann, bob"):
        load_speech(str(folder), "speaker")


# --- The cache ----------------------------------------------------------------------------------------------------


def kept() -> Path:
    (file,) = (cache_folder() / "speech").glob("*.safetensors")
    return file


def count_computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    computed = []
    compute = features._computed
    monkeypatch.setattr(features, "_computed", lambda name, *rest: computed.append(name) or compute(name, *rest))
    return computed


def test_features_are_computed_once(tmp_path, monkeypatch):
    computed, folder = count_computed(monkeypatch), str(write_table(tmp_path / "data"))
    first, second = load_speech(folder), load_speech(folder)
    assert len(computed) == 1
    for part in ("train", "valid", "test"):
        one, other = getattr(first, part), getattr(second, part)
        assert torch.equal(one.frames, other.frames)
        assert torch.equal(one.ends, other.ends)
        assert (one.texts, one.names) == (other.texts, other.names)


def test_features_follow_from_sound_text_and_settings(tmp_path, monkeypatch):
    computed, folder = count_computed(monkeypatch), write_table(tmp_path / "data")
    checksums = [load_speech(str(folder)).checksum, load_speech(str(folder), resample=False).checksum]
    soundfile.write(folder / "wavs" / "C02.wav", tone(900, 0.1, 8000), 8000)
    checksums.append(load_speech(str(folder)).checksum)
    (folder / "metadata.csv").write_text((folder / "metadata.csv").read_text().replace("text three", "text tree"))
    checksums.append(load_speech(str(folder)).checksum)
    assert len(set(checksums)) == len(computed) == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "no checksum"])
def test_a_damaged_cache_is_computed_again(tmp_path, monkeypatch, damage):
    computed, folder = count_computed(monkeypatch), str(write_table(tmp_path / "data"))
    whole = load_speech(folder)
    content = bytearray(kept().read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        kept().write_bytes(content)
    elif damage == "cut":
        kept().write_bytes(content[:-10])
    else:
        (kept() if damage == "delete" else kept().with_suffix(".sha256")).unlink()
    assert torch.equal(load_speech(folder).train.frames, whole.train.frames)
    assert len(computed) == 2
    load_speech(folder)
    assert len(computed) == 2  # mended


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="features are not cached"):
        assert len(load_speech(str(write_table(tmp_path / "data"))).train) == 15
    monkeypatch.delenv("SUBQUAD_CACHE")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.warns(UserWarning, match="features are not cached: no home"):
        assert len(load_speech(str(tmp_path / "data")).train) == 15


def test_features_that_were_not_used_for_the_longest_time_make_room(tmp_path, monkeypatch):
    computed = count_computed(monkeypatch)
    folders = [str(write_table(tmp_path / name, lines)) for name, lines in (("a", 20), ("b", 21), ("c", 22))]

    def load(folder: str) -> set[str]:
        """The names of the features that are there afterwards."""
        load_speech(folder)
        kept = {path.stem for path in (cache_folder() / "speech").glob("*.safetensors")}
        assert kept == {path.stem for path in (cache_folder() / "speech").glob("*.sha256")}
        return kept

    first = load(folders[0])
    assert load(folders[1]) > first
    for path in (cache_folder() / "speech").iterdir():
        written = 1 if path.stem in first else 2  # long ago, and in this order
        os.utime(path, (written, written))
    assert load(folders[0]) > first  # used again
    size = sum(path.stat().st_size for path in (cache_folder() / "speech").glob("*.safetensors"))
    monkeypatch.setattr(features, "MAX_CACHED_BYTES", size + size // 4)  # two of them, not three
    last = load(folders[2])
    assert len(last) == 2 and last > first
    assert len(computed) == 3
    monkeypatch.setattr(features, "MAX_CACHED_BYTES", 1)
    assert len(load(folders[1])) == 1  # What is in use stays, however large it is.


# --- Real data ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (REAL / "ljspeech-sample").is_dir(), reason="SUBQUAD_DATA names no folder with ljspeech-sample")
def test_the_real_clips_have_features_of_the_right_shape_and_scale():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_speech(str(REAL / "ljspeech-sample"))
    assert sum(map(len, (found.train, found.valid, found.test))) == 32
    for part in (found.train, found.valid, found.test):
        for i in range(len(part)):
            assert part[i].shape[1] == 80
            assert 100 < len(part[i]) < 1020  # 1 to 10 seconds
            assert -1.5 < float(part[i].min()) <= float(part[i].max()) - 1 < 1
            assert len(characters(part.texts[i])) < 0.25 * len(part[i])


@pytest.mark.skipif(not (REAL / "fsdd").is_dir(), reason="SUBQUAD_DATA names no folder with fsdd")
@pytest.mark.parametrize("split", ["index", "speaker"])
def test_the_spoken_digits_load(split):
    found = load_speech(str(REAL / "fsdd"), split, clips=60)
    assert [len(part) for part in (found.train, found.valid, found.test)] == [50, 5, 5]
    assert not found.skipped
