"""Reproducible speech synthesis by espeak-ng, from the optional package `espeakng-loader`.

The library keeps state between calls that cannot be reset, so each text is synthesized in a fork of a process that has
not synthesized anything yet. This module is that process, `python -m subquad_lab.data.espeak`, and its client. Only
that process loads espeak-ng, whose license is GPL-3.0-or-later:

    a line of JSON: text, voice, speed, pitch  ->  the number of bytes (4, little endian), then 16-bit samples
"""

import ctypes
import json
import os
import struct
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from subquad_lab import RunError, UsageError

SYNCHRONOUS, DONT_EXIT, UTF8 = 2, 0x8000, 1  # from espeak's speak_lib.h
SPEED, PITCH = 1, 3
FAILED = 2**32 - 1


class Speaker:
    """A speech synthesis process, started with the first text."""

    rate = 22_050
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.process is not None:
            self.process.communicate()

    def say(self, text: str, voice: str = "en-us", speed: int = 175, pitch: int = 50) -> bytes:
        """Synthesize a text.

        Args:
            text: Text to synthesize.
            voice: espeak voice, such as en-us, en-gb-scotland or en-us+f4. Breathy variants such as f2, f3, f5 and
                whisper contain random noise and are not reproducible.
            speed: Words per minute.
            pitch: Pitch from 0 to 99.

        Returns:
            16-bit samples.

        Raises:
            ValueError: If espeak does not know the voice.
        """
        if self.process is None:
            self.process = _started()
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"text": text, "voice": voice, "speed": speed, "pitch": pitch}
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            (size,) = struct.unpack("<I", self.process.stdout.read(4))
        except (OSError, struct.error) as error:
            raise RunError("espeak-ng exited before producing audio") from error
        if size == FAILED:
            raise ValueError(f"espeak-ng cannot synthesize {text[:40]!r} with the voice {voice!r}")
        samples = self.process.stdout.read(size)
        if len(samples) < size:
            raise RunError("espeak-ng exited while producing audio")
        return samples


def voices() -> list[str]:
    """Return the names of all espeak voices, without variants such as +f4."""
    import espeakng_loader

    places = Path(espeakng_loader.get_data_path()) / "lang"
    return sorted(path.name.lower() for path in places.rglob("*") if path.is_file())


def version() -> str:
    """Return the version of the package that contains espeak-ng; the audio depends on it."""
    return metadata.version("espeakng-loader") if find_spec("espeakng_loader") is not None else "missing"


def _started() -> subprocess.Popen[bytes]:
    if find_spec("espeakng_loader") is None:
        raise UsageError(
            "espeak-ng (speech synthesis) is not installed; install it with: pip install 'subquad[speech]'"
        )
    command = [sys.executable, "-P", "-m", "subquad_lab.data.espeak"]  # -P: import nothing from the current folder
    # In its own session: Ctrl-C reaches only the client, which then ends this process.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def main() -> None:
    """Answer requests until standard input is closed."""
    import espeakng_loader

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    library.espeak_Initialize(SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), DONT_EXIT)
    try:
        for line in sys.stdin.buffer:
            said = _forked(library, line)
            answer = struct.pack("<I", FAILED) if said is None else struct.pack("<I", len(said)) + said
            sys.stdout.buffer.write(answer)
            sys.stdout.buffer.flush()
    except BrokenPipeError:  # The client is gone.
        os._exit(0)


def _forked(library: Any, line: bytes) -> bytes | None:
    """Return the samples synthesized in a fresh fork, or None if it fails."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(sink, "wb") as out:
                out.write(speak(library, **json.loads(line)))
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as heard:
        said = heard.read()
    return said if os.waitpid(child, 0)[1] == 0 else None


def speak(library: Any, text: str, voice: str, speed: int, pitch: int) -> bytes:
    """Synthesize one text, in the fork."""
    parts: list[bytes] = []

    def heard(samples: Any, count: int, _: Any) -> int:
        if samples and count:
            parts.append(ctypes.string_at(samples, 2 * count))
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    called = kind(heard)  # Keep a reference as long as it may be called.
    library.espeak_SetSynthCallback(called)
    content = text.encode() + b"\0"
    size = ctypes.c_size_t(len(content))
    if library.espeak_SetVoiceByName(voice.encode()) != 0:
        raise ValueError(voice)
    library.espeak_SetParameter(SPEED, speed, 0)
    library.espeak_SetParameter(PITCH, pitch, 0)
    if library.espeak_Synth(content, size, 0, 0, 0, UTF8, None, None) != 0:
        raise ValueError(text)
    return b"".join(parts)


if __name__ == "__main__":
    main()
