"""`subquad synthesize`: a folder like LJSpeech's from transcripts alone, spoken by espeak-ng.

A clip is whole or not there, and follows from its id, its text and the voices alone; so a stopped command goes on.
"""

import io
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from subquad_lab import UsageError
from subquad_lab.data import espeak
from subquad_lab.data.espeak import Speaker
from subquad_lab.data.speech import SYNTHETIC, Transcript, transcripts
from subquad_lab.system.files import locked, write_whole
from subquad_lab.training.interruption import Interrupted, Interruption

SPEEDS, PITCHES = (150, 190), (40, 60)
SHORTEST = 0.1  # seconds of a clip
TELL = 500  # clips between two lines of a log
SHOWN = 12  # voices that a message names


def run(metadata: str, out: str, voices: str, clips: int | None) -> None:
    table, folder = Path(metadata), Path(out)
    if not table.is_file():
        what = "is no regular file" if table.exists() else "does not exist"
        raise UsageError(f"METADATA: {table} {what}; expected a file with lines of id|text|normalised text")
    if clips is not None and clips < 1:
        raise UsageError(f"--clips: expected a whole number >= 1, found {clips}")
    lines = transcripts(table)[:clips]
    wanted = [line for line in lines if line.text.strip()]
    faults = [f"{line.name}: {line.fault or 'has no text'}" for line in lines if not line.text.strip()]
    if not wanted:
        why = faults[0] if faults else "expected id|text|normalised text"
        raise UsageError(f"METADATA: {table} has no line that can be spoken: {why}")
    spoken = [voice.strip() for voice in voices.split(",")]
    with Speaker() as speaker:
        check_voices(speaker, spoken)
        try:
            (folder / "wavs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"OUT: cannot make {folder}: {error.strerror}") from error
        with locked(folder):
            check_same(folder, wanted, spoken)
            remove_unfinished(folder)
            describe(folder, wanted, spoken)
            for fault in faults:
                print(f"subquad: warning: {fault}", file=sys.stderr)
            try:
                speak(speaker, folder, wanted, spoken)
            finally:
                made = [line for line in wanted if clip_of(folder, line).exists()]
                describe(folder, made, spoken)
    left = len(lines) - len(made)
    print(f"{folder}: {len(made):,} clips{f', {left:,} left out' if left else ''}; train with: "
          f"subquad train speech --data {folder}")  # fmt: skip


def check_voices(speaker: Speaker, voices: list[str]) -> None:
    """Each says a word, before anything is written."""
    for voice in voices:
        try:
            speaker.say("one", voice=voice)
        except UsageError:  # espeak-ng is missing
            raise
        except ValueError as error:
            known = espeak.voices()
            near = sorted(known, key=lambda name: (not name.startswith(voice[:2].lower()), name))[:SHOWN]
            raise UsageError(f"--voices: espeak-ng has no voice {voice!r}; expected one of {', '.join(near)}, and "
                             f"{len(known) - len(near)} more, or a variant such as en-us+f4") from error  # fmt: skip


def check_same(folder: Path, wanted: list[Transcript], voices: list[str]) -> None:
    """A folder may grow; clips of other texts or voices stay out of it."""
    if not any((folder / "wavs").iterdir()) and not (folder / "metadata.csv").exists():
        return
    try:
        before, known = json.loads((folder / SYNTHETIC).read_text()), transcripts(folder / "metadata.csv")
    except (OSError, ValueError) as error:
        raise UsageError(f"OUT: {folder} holds other files; expected a new folder") from error
    if before != json.loads(json.dumps(manners(voices))):
        raise UsageError(f"OUT: {folder} was made with other voices; expected the same, or a new folder")
    texts = {line.name: line.text for line in wanted}
    for line in known:
        if texts.get(line.name, line.text) != line.text:
            raise UsageError(f"OUT: {folder} was made from other texts: {line.name} says {line.text[:40]!r}, where "
                             f"{texts[line.name][:40]!r} is wanted; expected the same, or a new folder")  # fmt: skip
    if missing := [line.name for line in known if line.name not in texts]:
        found = f"{len(known):,} clips, of which {len(missing):,} are not wanted now (such as {missing[0]})"
        raise UsageError(f"OUT: {folder} holds {found}; expected at least as many --clips, or a new folder")


def remove_unfinished(folder: Path) -> None:
    """What a process that was killed had begun to write; the folder is locked, so nobody else is at it."""
    for path in [*folder.iterdir(), *(folder / "wavs").iterdir()]:
        if re.fullmatch(r"\..+\.(wav|csv|json)\.\d+", path.name):
            path.unlink()


def manners(voices: list[str]) -> dict[str, Any]:
    return {"by": "espeak-ng", "voices": voices, "speeds": SPEEDS, "pitches": PITCHES}


def describe(folder: Path, lines: list[Transcript], voices: list[str]) -> None:
    """What the clips follow from."""
    write_whole(folder / SYNTHETIC, json.dumps(manners(voices), indent=1).encode())
    table = "".join(f"{line.name}|{line.original}|{line.text}\n" for line in lines)
    write_whole(folder / "metadata.csv", table.encode())


def clip_of(folder: Path, line: Transcript) -> Path:
    return folder / "wavs" / f"{line.name}.wav"


def speak(speaker: Speaker, folder: Path, wanted: list[Transcript], voices: list[str]) -> None:
    """Each clip that is not there yet, until a signal; what cannot be spoken is named."""
    console = Console(stderr=True)
    bar = Progress(TextColumn("clips"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console,
                   disable=not console.is_terminal)  # fmt: skip
    with Interruption() as interruption, bar:
        shown = bar.add_task("", total=len(wanted))
        for i, line in enumerate(wanted, 1):
            if interruption.number is not None:
                raise Interrupted(interruption.number)
            path = clip_of(folder, line)
            if not path.exists():
                try:
                    samples = speaker.say(line.text, **manner(line.name, voices))
                    if len(samples) < 2 * SHORTEST * speaker.rate:
                        raise ValueError(f"there is nothing to say in {line.text[:40]!r}")
                    write_whole(path, wav(samples, speaker.rate))
                except ValueError as error:
                    console.print(f"subquad: warning: {line.name}: {error}", markup=False, soft_wrap=True)
            bar.update(shown, completed=i)
            if bar.disable and (i % TELL == 0 or i == len(wanted)):
                print(f"{i:,} of {len(wanted):,} clips", file=sys.stderr, flush=True)


def manner(name: str, voices: list[str]) -> dict[str, Any]:
    """Of a clip: drawn from its id."""
    draw = random.Random(name)
    return {"voice": draw.choice(voices), "speed": draw.randint(*SPEEDS), "pitch": draw.randint(*PITCHES)}


def wav(samples: bytes, rate: int) -> bytes:
    import soundfile

    content = io.BytesIO()
    soundfile.write(content, np.frombuffer(samples, np.int16), rate, format="WAV", subtype="PCM_16")
    return content.getvalue()
