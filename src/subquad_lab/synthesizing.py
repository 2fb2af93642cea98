"""`subquad synthesize`: a folder like LJSpeech's from transcripts alone, spoken by espeak-ng.

A clip is whole or not there, and follows from its id, its text and the voices alone; so a stopped command goes on.
"""

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from subquad_lab import UsageError
from subquad_lab.data.espeak import Speaker
from subquad_lab.data.speech import SYNTHETIC, transcripts
from subquad_lab.files import locked, write_whole

SPEEDS, PITCHES = (150, 190), (40, 60)
SHORTEST = 0.1  # seconds of a clip
TELL = 500  # clips between two lines of a log


def run(metadata: str, out: str, voices: str, clips: int | None) -> None:
    table, folder = Path(metadata), Path(out)
    if not table.is_file():
        raise UsageError(f"METADATA: there is no file {table}")
    if clips is not None and clips < 1:
        raise UsageError(f"--clips: expected a whole number >= 1, found {clips}")
    lines = transcripts(table)[:clips]
    wanted = [(line.name, line.text) for line in lines if line.text.strip()]
    if not wanted:
        raise UsageError(f"METADATA: {table} has no line with id|text|normalised text")
    spoken = [voice.strip() for voice in voices.split(",")]
    with Speaker() as speaker:
        check_voices(speaker, spoken)
        try:
            (folder / "wavs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"OUT: cannot make {folder}: {error.strerror}") from error
        with locked(folder):
            describe(folder, wanted, spoken)
            for line in lines:
                if not line.text.strip():
                    print(f"subquad: warning: {line.name}: {line.fault or 'has no text'}", file=sys.stderr)
            failed = speak(speaker, folder, wanted, spoken)
    left = len(lines) - len(wanted) + failed
    print(f"{folder}: {len(wanted) - failed:,} clips{f', {left:,} left out' if left else ''}; train with: "
          f"subquad train speech --data {folder}")  # fmt: skip


def check_voices(speaker: Speaker, voices: list[str]) -> None:
    """Each says a word, before anything is written."""
    for voice in voices:
        try:
            speaker.say("one", voice=voice)
        except UsageError:  # espeak-ng is missing
            raise
        except ValueError as error:
            raise UsageError(f"--voices: espeak-ng has no voice {voice!r}") from error


def describe(folder: Path, wanted: list[tuple[str, str]], voices: list[str]) -> None:
    """What the clips follow from. A folder may grow; clips of other texts or voices stay out of it."""
    said = {"by": "espeak-ng", "voices": voices, "speeds": SPEEDS, "pitches": PITCHES}
    lines = [f"{name}|{text}|{text}" for name, text in wanted]
    place, table = folder / SYNTHETIC, folder / "metadata.csv"
    if any((folder / "wavs").iterdir()) or table.exists():
        try:
            before, known = json.loads(place.read_text()), table.read_text().splitlines()
        except (OSError, ValueError) as error:
            raise UsageError(f"OUT: {folder} holds other files; expected a new folder") from error
        if before != json.loads(json.dumps(said)) or known != lines[: len(known)]:
            raise UsageError(f"OUT: {folder} was made from other texts or voices; expected the same, or a new folder")
    write_whole(place, json.dumps(said, indent=1).encode())
    write_whole(table, "".join(f"{line}\n" for line in lines).encode())


def speak(speaker: Speaker, folder: Path, wanted: list[tuple[str, str]], voices: list[str]) -> int:
    """Each clip that is not there yet; how many could not be spoken."""
    console = Console(stderr=True)
    bar = Progress(TextColumn("clips"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console,
                   disable=not console.is_terminal)  # fmt: skip
    failed = 0
    with bar:
        shown = bar.add_task("", total=len(wanted))
        for i, (name, text) in enumerate(wanted, 1):
            path = folder / "wavs" / f"{name}.wav"
            if not path.exists():
                try:
                    samples = speaker.say(text, **manner(name, voices))
                    if len(samples) < 2 * SHORTEST * speaker.rate:
                        raise ValueError(f"there is nothing to say in {text[:40]!r}")
                    write_whole(path, wav(samples, speaker.rate))
                except ValueError as error:
                    failed += 1
                    console.print(f"subquad: warning: {name}: {error}", markup=False, soft_wrap=True)
            bar.update(shown, completed=i)
            if bar.disable and (i % TELL == 0 or i == len(wanted)):
                print(f"{i:,} of {len(wanted):,} clips", file=sys.stderr, flush=True)
    return failed


def manner(name: str, voices: list[str]) -> dict[str, Any]:
    """Of a clip: drawn from its id."""
    draw = random.Random(name)
    return {"voice": draw.choice(voices), "speed": draw.randint(*SPEEDS), "pitch": draw.randint(*PITCHES)}


def wav(samples: bytes, rate: int) -> bytes:
    import soundfile

    content = io.BytesIO()
    soundfile.write(content, np.frombuffer(samples, np.int16), rate, format="WAV", subtype="PCM_16")
    return content.getvalue()
