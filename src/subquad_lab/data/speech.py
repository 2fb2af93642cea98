"""Speech clips with transcripts, from three kinds of sources.

    embedded         spoken numbers, synthesized by espeak-ng (needs the extra `speech`) with several voices, speeds and
                     pitches; each number is in one part only
    LJSpeech         metadata.csv with id|text|normalized text, and wavs/: the first 75 % of the lines for training, the
                     next 5 % for validation, the last 20 % for testing
    spoken digits    {digit}_{speaker}_{index}.wav: clips joined at random into strings of 3 to 6 digits; the clips are
                     split before they are joined, by index (0 to 4 test, 5 to 9 validation) or by speaker

Unusable clips are skipped with a warning.
"""

import random
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad_lab import UsageError
from subquad_lab.data import espeak
from subquad_lab.data.clips import PARTS, Clips, Utterance, featured
from subquad_lab.data.espeak import Speaker
from subquad_lab.data.sound import RATE, read_sound, resampled
from subquad_lab.system.regular_file import read_regular

START, END, PAD, UNKNOWN = range(4)
ALPHABET = " ,.?-abcdefghijklmnopqrstuvwxyz"  # numbered after the four above, 35 in total
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
VOICES = ("en-us", "gmw/en", "en-gb-scotland", "en-gb-x-rp", "en-us+f4", "en-us+m3", "en-gb-x-rp+f1", "gmw/en+f1")
SPEEDS, PITCHES = (130, 200), (30, 70)
DEFAULT_CLIPS = 2400
MAX_TABLE_BYTES = 1 << 28  # of metadata.csv; LJSpeech has 2 MB
MIN_LINES = 5  # of metadata.csv, so that no part is empty
MAX_STRINGS = 100_000
PAUSE_SECONDS = (0.02, 0.12)  # between joined digits
SYNTHETIC = "synthesis.json"  # marks a folder of synthesized clips
Split = Literal["index", "speaker"]


def characters(text: str) -> list[int]:
    """Return the character numbers of a text; characters outside the alphabet are UNKNOWN."""
    return [ALPHABET.index(c) + 4 if c in ALPHABET else UNKNOWN for c in text.lower()]


def text_of(numbers: Iterable[int]) -> str:
    return "".join("#" if number == UNKNOWN else ALPHABET[number - 4] for number in numbers if number > PAD)


def load_speech(data: str | None, split: Split = "index", clips: int | None = None, resample: bool = True) -> Clips:
    """Load the embedded numbers, or a data set from a folder.

    Args:
        data: Folder with metadata.csv and wavs/, or with spoken digits. Default: the embedded spoken numbers.
        split: How spoken digits are split.
        clips: Number of spoken numbers or strings of digits (default: 2,400), a twelfth each for validation and test;
            or number of lines of metadata.csv (default: all).
        resample: Resample to 16 kHz. If False, samples are treated as 16 kHz whatever their rate.
    """
    if data is None:
        with Speaker() as speaker:
            numbers = _numbers(DEFAULT_CLIPS if clips is None else clips, speaker, resample)
            return featured("spoken numbers, synthetic", numbers, [resample, espeak.version()])
    folder = Path(data)
    if not folder.is_dir():
        raise UsageError(f"--data: expected a folder, got the file {folder}" if folder.exists()
                         else f"--data: no such folder: {folder}")  # fmt: skip
    for place in (folder, folder / "LJSpeech-1.1"):
        if (place / "metadata.csv").is_file():
            name = f"{place.resolve().name}, synthetic" if (place / SYNTHETIC).exists() else place.resolve().name
            return featured(name, _transcribed(place / "metadata.csv", clips, resample), resample)
    place = folder / "recordings" if (folder / "recordings").is_dir() else folder
    found = {
        path: match for path in sorted(place.glob("*.wav")) if (match := re.fullmatch(r"(\d)_(\w+)_(\d+)", path.stem))
    }
    if found:
        strings = _joined(found, split, DEFAULT_CLIPS if clips is None else clips, resample)
        return featured(f"spoken digits, by {split}", strings, resample)
    raise UsageError(f"--data: expected metadata.csv or files like 7_george_3.wav in {folder}, got neither")


# --- Numbers ------------------------------------------------------------------------------------------------------


def in_words(number: int) -> str:
    """Spell a number.

    >>> in_words(742), in_words(2006), in_words(90)
    ('seven hundred and forty two', 'two thousand and six', 'ninety')
    """
    if number >= 1000:
        thousands, rest = f"{in_words(number // 1000)} thousand", number % 1000
        return thousands + (f"{' and' if rest < 100 else ''} {in_words(rest)}" if rest else "")
    if number >= 100:
        rest = number % 100
        return f"{DIGITS[number // 100]} hundred" + (f" and {in_words(rest)}" if rest else "")
    if number >= 20:
        return TENS[number // 10] + (f" {DIGITS[number % 10]}" if number % 10 else "")
    return TEENS[number - 10] if number >= 10 else DIGITS[number]


def _numbers(clips: int, speaker: Speaker, resample: bool) -> dict[str, list[Utterance]]:
    """Return numbers below 10,000, each in one part only."""
    if not 24 <= clips <= 10_000:
        raise UsageError(f"clips: expected 24 to 10,000 spoken numbers, got {clips:,}")
    draw = random.Random(0)
    made = []
    for number in draw.sample(range(10_000), clips):
        text, voice = in_words(number), draw.choice(VOICES)
        how = {"voice": voice, "speed": draw.randint(*SPEEDS), "pitch": draw.randint(*PITCHES)}
        made.append(Utterance(f"{number} {how}", text, partial(_spoken, speaker, text, how, resample)))
    few = clips // 12
    return {"train": made[2 * few :], "valid": made[:few], "test": made[few : 2 * few]}


def _spoken(speaker: Speaker, text: str, how: dict[str, Any], resample: bool) -> Tensor:
    samples = np.frombuffer(speaker.say(text, **how), np.int16).astype(np.float32) / 2**15
    return torch.from_numpy(resampled(samples, speaker.rate, RATE) if resample else samples)


# --- A table of transcripts ---------------------------------------------------------------------------------------


class Transcript(NamedTuple):
    """A line of metadata.csv; `fault` is the reason why it cannot be used."""

    name: str
    text: str  # normalized
    original: str = ""
    fault: str = ""


def transcripts(table: Path) -> list[Transcript]:
    """Return all lines of metadata.csv that are not empty."""
    made: list[Transcript] = []
    known: set[str] = set()
    for number, line in enumerate(_read(table).split("\n"), 1):
        cells = line.strip("\r").split("|")
        where = f"{table.name}, line {number}"
        if not line.strip():
            continue
        fault = ""
        if len(cells) not in (2, 3):
            fault = "expected id|text|normalized text"
        elif not re.fullmatch(r"[\w.-]{1,200}", cells[0]):
            shown = cells[0] if len(cells[0]) <= 40 else f"{cells[0][:40]}... ({len(cells[0]):,} characters)"
            fault = f"expected an id of 1 to 200 letters, digits, underscores, dots or dashes, got {shown!r}"
        elif cells[0] in known:
            fault = f"duplicate id {cells[0]}"
        made.append(Transcript(where, "", fault=fault) if fault else Transcript(cells[0], cells[-1], cells[1]))
        known.add(made[-1].name)
    return made


def _read(table: Path) -> str:
    try:
        return read_regular(table, MAX_TABLE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{table} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except OSError as error:
        raise UsageError(f"cannot read {table}: {error.strerror}") from error


def _transcribed(table: Path, clips: int | None, resample: bool) -> dict[str, list[Utterance]]:
    made = []
    for line in transcripts(table)[:clips]:
        path = table.parent / "wavs" / f"{line.name}.wav"
        if not path.is_file() and path.with_suffix(".flac").is_file():
            path = path.with_suffix(".flac")
        made.append(Utterance(line.name, line.text, partial(_heard, line, path, resample), (path,)))
    if len(made) < MIN_LINES:
        raise UsageError(f"--data: expected at least {MIN_LINES} lines in {table}, got {len(made)}")
    first = len(made) * 3 // 4
    second = max(first + 1, len(made) * 4 // 5)
    return {"train": made[:first], "valid": made[first:second], "test": made[second:]}


def _heard(line: Transcript, path: Path, resample: bool) -> Tensor:
    if line.fault:
        raise ValueError(line.fault)
    return read_sound(path, RATE if resample else None)


# --- Digits -------------------------------------------------------------------------------------------------------


def _joined(found: dict[Path, re.Match[str]], split: Split, clips: int, resample: bool) -> dict[str, list[Utterance]]:
    """Join clips into strings of 3 to 6 digits, each by one speaker."""
    speakers = sorted({match[2] for match in found.values()})
    if split == "speaker" and len(speakers) < 3:
        raise UsageError(f"split: expected at least 3 speakers, got {', '.join(speakers)}")

    def part_of(match: re.Match[str]) -> str:
        if split == "index":
            return "test" if int(match[3]) < 5 else "valid" if int(match[3]) < 10 else "train"
        return {speakers[-1]: "test", speakers[-2]: "valid"}.get(match[2], "train")

    if not 12 <= clips <= MAX_STRINGS:
        raise UsageError(f"clips: expected 12 to {MAX_STRINGS:,} strings of digits, got {clips:,}")
    draw, parts = random.Random(0), {}
    for part in PARTS:
        groups: dict[str, list[tuple[Path, int]]] = {}
        for path, match in found.items():
            if part_of(match) == part:
                groups.setdefault(match[2], []).append((path, int(match[1])))
        if not groups:
            raise UsageError(f"--data: the {part} part is empty with --split {split}")
        count = clips // 12 if part != "train" else clips - 2 * (clips // 12)
        parts[part] = [
            _string(draw, groups[draw.choice(sorted(groups))], resample, f"{part}-{i}") for i in range(count)
        ]
    return parts


def _string(draw: random.Random, clips: list[tuple[Path, int]], resample: bool, name: str) -> Utterance:
    chosen = [draw.choice(clips) for _ in range(draw.randint(3, 6))]
    pauses = [draw.uniform(*PAUSE_SECONDS) for _ in chosen]

    def sound() -> Tensor:
        pieces = []
        for (path, _), pause in zip(chosen, pauses, strict=True):
            pieces += [read_sound(path, RATE if resample else None), torch.zeros(int(pause * RATE))]
        return torch.cat(pieces)

    return Utterance(name, " ".join(DIGITS[digit] for _, digit in chosen), sound, tuple(path for path, _ in chosen))
