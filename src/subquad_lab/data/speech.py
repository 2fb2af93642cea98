"""Clips of speech and what is said in them, from three kinds of places.

    embedded         spoken numbers, synthesized by espeak-ng (the extra `speech`): several voices, speeds and pitches;
                     a number is in one part alone
    LJSpeech's       metadata.csv with id|text|normalized text, and wavs/: the first 75 % of the lines are for training,
                     5 % for validation, 20 % for the test
    spoken digits    {digit}_{speaker}_{index}.wav: clips joined at random into strings of 3 to 6 digits; the clips are
                     split before they are joined, by index (0 to 4 test, 5 to 9 validation) or by speaker

Clips that cannot be used are left out, named and counted.
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

START, END, PAD, UNKNOWN = range(4)
ALPHABET = " ,.?-abcdefghijklmnopqrstuvwxyz"  # after the four above: 35 in all
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
VOICES = ("en-us", "gmw/en", "en-gb-scotland", "en-gb-x-rp", "en-us+f4", "en-us+m3", "en-gb-x-rp+f1", "gmw/en+f1")
SPEEDS, PITCHES = (130, 200), (30, 70)
CLIPS = 2400
LEAST_LINES = 5  # of a table: three parts
MOST_STRINGS = 100_000
PAUSE = (0.02, 0.12)  # seconds between joined digits
SYNTHETIC = "synthesis.json"  # in a folder whose clips were synthesized
Split = Literal["index", "speaker"]


def characters(text: str) -> list[int]:
    """Numbers of the alphabet; what is not in it is unknown."""
    return [ALPHABET.index(c) + 4 if c in ALPHABET else UNKNOWN for c in text.lower()]


def text_of(numbers: Iterable[int]) -> str:
    return "".join("#" if number == UNKNOWN else ALPHABET[number - 4] for number in numbers if number > PAD)


def load_speech(data: str | None, split: Split = "index", clips: int | None = None, resample: bool = True) -> Clips:
    """The embedded numbers, or what a folder holds.

    Args:
        data: A folder with metadata.csv and wavs/, or with spoken digits; spoken numbers if not given.
        split: Of spoken digits.
        clips: Numbers or strings of digits in all parts, of which a twelfth each are for validation and test, 2,400 if
            not given. Of metadata.csv the first lines, all if not given.
        resample: To 16 kHz; without it sound of another rate is taken as if it had that.
    """
    if data is None:
        with Speaker() as speaker:
            numbers = _numbers(CLIPS if clips is None else clips, speaker, resample)
            return featured("spoken numbers, synthetic", numbers, [resample, espeak.version()])
    folder = Path(data)
    if not folder.is_dir():
        what = f"{folder} is a file, not a folder" if folder.exists() else f"there is no folder {folder}"
        raise UsageError(f"--data: {what}")
    for place in (folder, folder / "LJSpeech-1.1"):
        if (place / "metadata.csv").is_file():
            name = f"{place.resolve().name}, synthetic" if (place / SYNTHETIC).exists() else place.resolve().name
            return featured(name, _transcribed(place / "metadata.csv", clips, resample), resample)
    place = folder / "recordings" if (folder / "recordings").is_dir() else folder
    found = {
        path: match for path in sorted(place.glob("*.wav")) if (match := re.fullmatch(r"(\d)_(\w+)_(\d+)", path.stem))
    }
    if found:
        return featured(
            f"spoken digits, by {split}", _joined(found, split, CLIPS if clips is None else clips, resample), resample
        )
    raise UsageError(f"--data: expected metadata.csv or files like 7_george_3.wav in {folder}, got neither")


# --- Numbers ------------------------------------------------------------------------------------------------------


def in_words(number: int) -> str:
    """
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
    """Below 10,000, each in one part alone."""
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
    """A line of the table; `fault` says why it cannot be used."""

    name: str
    text: str  # normalized
    original: str = ""
    fault: str = ""


def transcripts(table: Path) -> list[Transcript]:
    """Each line that is not empty."""
    made: list[Transcript] = []
    known: set[str] = set()
    for number, line in enumerate(_read(table).split("\n"), 1):
        cells = line.strip("\r").split("|")
        where = f"{table.name}, line {number}"
        if not line.strip():
            continue
        fault = ""
        if len(cells) not in (2, 3):
            fault = "is not id|text|normalized text"
        elif not re.fullmatch(r"[\w.-]{1,200}", cells[0]):
            shown = cells[0] if len(cells[0]) <= 40 else f"{cells[0][:40]}... ({len(cells[0]):,} characters)"
            fault = f"has the id {shown!r}; expected 1 to 200 letters, digits, underscores, dots or dashes"
        elif cells[0] in known:
            fault = f"has the id {cells[0]}, which was there before"
        made.append(Transcript(where, "", fault=fault) if fault else Transcript(cells[0], cells[-1], cells[1]))
        known.add(made[-1].name)
    return made


def _read(table: Path) -> str:
    try:
        return table.read_text("utf-8-sig")
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
    if len(made) < LEAST_LINES:
        raise UsageError(f"--data: expected at least {LEAST_LINES} lines of {table}, got {len(made)}")
    first = len(made) * 3 // 4
    second = max(first + 1, len(made) * 4 // 5)
    return {"train": made[:first], "valid": made[first:second], "test": made[second:]}


def _heard(line: Transcript, path: Path, resample: bool) -> Tensor:
    if line.fault:
        raise ValueError(line.fault)
    return read_sound(path, RATE if resample else None)


# --- Digits -------------------------------------------------------------------------------------------------------


def _joined(found: dict[Path, re.Match[str]], split: Split, clips: int, resample: bool) -> dict[str, list[Utterance]]:
    """Strings of 3 to 6 digits, all of one speaker."""
    speakers = sorted({match[2] for match in found.values()})
    if split == "speaker" and len(speakers) < 3:
        raise UsageError(f"split: expected at least 3 speakers, got {', '.join(speakers)}")

    def part_of(match: re.Match[str]) -> str:
        if split == "index":
            return "test" if int(match[3]) < 5 else "valid" if int(match[3]) < 10 else "train"
        return {speakers[-1]: "test", speakers[-2]: "valid"}.get(match[2], "train")

    if not 12 <= clips <= MOST_STRINGS:
        raise UsageError(f"clips: expected 12 to {MOST_STRINGS:,} strings of digits, got {clips:,}")
    draw, parts = random.Random(0), {}
    for part in PARTS:
        groups: dict[str, list[tuple[Path, int]]] = {}
        for path, match in found.items():
            if part_of(match) == part:
                groups.setdefault(match[2], []).append((path, int(match[1])))
        if not groups:
            raise UsageError(f"--data: the {part} part has no clips when they are split by {split}")
        count = clips // 12 if part != "train" else clips - 2 * (clips // 12)
        parts[part] = [
            _string(draw, groups[draw.choice(sorted(groups))], resample, f"{part}-{i}") for i in range(count)
        ]
    return parts


def _string(draw: random.Random, clips: list[tuple[Path, int]], resample: bool, name: str) -> Utterance:
    chosen = [draw.choice(clips) for _ in range(draw.randint(3, 6))]
    pauses = [draw.uniform(*PAUSE) for _ in chosen]

    def sound() -> Tensor:
        pieces = []
        for (path, _), pause in zip(chosen, pauses, strict=True):
            pieces += [read_sound(path, RATE if resample else None), torch.zeros(int(pause * RATE))]
        return torch.cat(pieces)

    return Utterance(name, " ".join(DIGITS[digit] for _, digit in chosen), sound, tuple(path for path, _ in chosen))
