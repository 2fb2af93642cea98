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
TELL = 500  # clips between two lines of a log


def run(metadata: str, out: str, voices: str, clips: int | None) -> None:
    table, folder = Path(metadata), Path(out)
    if not table.is_file():
        raise UsageError(f"METADATA: there is no file {table}")
    if clips is not None and clips < 1:
        raise UsageError(f"--clips: expected a whole number >= 1, found {clips}")
    wanted = [(name, text) for name, text in transcripts(table) if text.strip()][:clips]
    if not wanted:
        raise UsageError(f"METADATA: {table} has no line with id|text|normalised text")
    names = [name for name, _ in wanted]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"METADATA: {table} has the id {twice} more than once")
    spoken = voices.split(",")
    try:
        (folder / "wavs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"OUT: cannot make {folder}: {error.strerror}") from error
    with locked(folder), Speaker() as speaker:
        describe(folder, wanted, spoken)
        failed = speak(speaker, folder, wanted, spoken)
    print(f"{folder}: {len(wanted) - failed:,} clips; train with: subquad train speech --data {folder}")
    if failed == len(wanted):
        raise UsageError(f"--voices: espeak-ng spoke none of the {failed:,} texts")


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
                    write_whole(path, wav(speaker.say(text, **manner(name, voices)), speaker.rate))
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
