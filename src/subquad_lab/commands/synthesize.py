"""`subquad synthesize`: a speech data set in LJSpeech format from transcripts, synthesized by espeak-ng.

Clips are written atomically and depend only on their id, their text and the voices, so an interrupted command can
resume.
"""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from subquad_lab import UsageError
from subquad_lab.data import espeak
from subquad_lab.data.espeak import Speaker
from subquad_lab.data.speech import SYNTHETIC, Transcript, transcripts
from subquad_lab.system.files import locked, read_json, remove_leftovers, write_whole
from subquad_lab.system.text import printable, say, warn
from subquad_lab.training.interruption import Interrupted, Interruption

SPEEDS, PITCHES = (150, 190), (40, 60)
MIN_CLIP_SECONDS = 0.1
CLIPS_PER_LOG_LINE = 500
MAX_SHOWN_VOICES = 12  # in a message


def run(metadata: str, out: str, voices: str, clips: int | None) -> None:
    table, folder = Path(metadata), Path(out)
    if not table.is_file():
        what = "is not a regular file" if table.exists() else "does not exist"
        raise UsageError(f"METADATA: {table} {what}; expected a file with lines of id|text|normalized text")
    if clips is not None and clips < 1:
        raise UsageError(f"--clips: expected a positive integer, got {clips}")
    lines = transcripts(table)[:clips]
    wanted = [line for line in lines if line.text.strip()]
    faults = [f"{line.name}: {line.fault or 'the text is empty'}" for line in lines if not line.text.strip()]
    if not wanted:
        why = faults[0] if faults else "expected id|text|normalized text"
        raise UsageError(f"METADATA: {table} has no usable line: {why}")
    spoken = [voice.strip() for voice in voices.split(",")]
    with Speaker() as speaker:
        check_voices(speaker, spoken)
        try:
            (folder / "wavs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"OUT: cannot create {folder}: {error.strerror}") from error
        with locked(folder):
            check_same(folder, wanted, spoken)
            for place in (folder, folder / "wavs"):
                remove_leftovers(place)
            describe(folder, wanted, spoken)
            for fault in faults:
                warn(fault)
            try:
                speak(speaker, folder, wanted, spoken)
            finally:
                made = [line for line in wanted if clip_of(folder, line).exists()]
                describe(folder, made, spoken)
    left = len(lines) - len(made)
    say(f"{folder}: {len(made):,} clips{f', {left:,} skipped' if left else ''}; train with: "
          f"subquad train speech --data {folder}")  # fmt: skip


def check_voices(speaker: Speaker, voices: list[str]) -> None:
    """Synthesize a word with each voice, so that unknown voices fail before anything is written."""
    for voice in voices:
        try:
            speaker.say("one", voice=voice)
        except UsageError:  # espeak-ng is missing
            raise
        except ValueError as error:
            known = espeak.voices()
            near = sorted(known, key=lambda name: (not name.startswith(voice[:2].lower()), name))[:MAX_SHOWN_VOICES]
            raise UsageError(f"--voices: espeak-ng has no voice {voice!r}; expected one of {', '.join(near)}, and "
                             f"{len(known) - len(near)} more, or a variant such as en-us+f4") from error  # fmt: skip


def check_same(folder: Path, wanted: list[Transcript], voices: list[str]) -> None:
    """Raise if the folder holds clips of other texts or voices; adding clips is fine."""
    if not any((folder / "wavs").iterdir()) and not (folder / "metadata.csv").exists():
        return
    try:
        before, known = read_json(folder / SYNTHETIC), transcripts(folder / "metadata.csv")
    except (OSError, ValueError) as error:
        raise UsageError(f"OUT: {folder} holds other files; use a new folder") from error
    if before != json.loads(json.dumps(settings(voices))):
        raise UsageError(f"OUT: {folder} was made with other voices; use the same voices or a new folder")
    texts = {line.name: line.text for line in wanted}
    for line in known:
        if texts.get(line.name, line.text) != line.text:
            raise UsageError(f"OUT: {folder} was made from other texts: expected {texts[line.name][:40]!r} for "
                             f"{line.name}, got {line.text[:40]!r}; use a new folder")  # fmt: skip
    if missing := [line.name for line in known if line.name not in texts]:
        raise UsageError(f"OUT: {folder} holds {len(known):,} clips, {len(missing):,} of which are not requested now "
                         "(such "
                         f"as {missing[0]}); use at least as many --clips or a new folder")  # fmt: skip


def settings(voices: list[str]) -> dict[str, Any]:
    return {"by": "espeak-ng", "voices": voices, "speeds": SPEEDS, "pitches": PITCHES}


def describe(folder: Path, lines: list[Transcript], voices: list[str]) -> None:
    """Write the metadata and the settings that the clips depend on."""
    write_whole(folder / SYNTHETIC, json.dumps(settings(voices), indent=1).encode())
    table = "".join(f"{line.name}|{line.original}|{line.text}\n" for line in lines)
    write_whole(folder / "metadata.csv", table.encode())


def clip_of(folder: Path, line: Transcript) -> Path:
    return folder / "wavs" / f"{line.name}.wav"


def speak(speaker: Speaker, folder: Path, wanted: list[Transcript], voices: list[str]) -> None:
    """Synthesize the missing clips until a signal arrives; warn about texts that cannot be synthesized."""
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
                    if len(samples) < 2 * MIN_CLIP_SECONDS * speaker.rate:
                        raise ValueError(f"nothing to pronounce in {line.text[:40]!r}")
                    write_whole(path, wav(samples, speaker.rate))
                except ValueError as error:
                    console.print(printable(f"subquad: warning: {line.name}: {error}"), markup=False, soft_wrap=True)
            bar.update(shown, completed=i)
            if bar.disable and (i % CLIPS_PER_LOG_LINE == 0 or i == len(wanted)):
                say(f"{i:,} of {len(wanted):,} clips", to_error=True, flush=True)


def manner(name: str, voices: list[str]) -> dict[str, Any]:
    """Return the voice, speed and pitch of a clip, drawn at random from its id."""
    draw = random.Random(name)
    return {"voice": draw.choice(voices), "speed": draw.randint(*SPEEDS), "pitch": draw.randint(*PITCHES)}


def wav(samples: bytes, rate: int) -> bytes:
    import soundfile

    content = io.BytesIO()
    soundfile.write(content, np.frombuffer(samples, np.int16), rate, format="WAV", subtype="PCM_16")
    return content.getvalue()
