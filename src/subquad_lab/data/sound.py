"""Audio files and their log-mel features.

    power = |stft|^2 (Hann window of 400 samples, hop 160, centered)  ->  80 mels  ->  log10(max(x, 1e-10))
    ->  max(x, largest value of the clip - 8)  ->  (x + 4) / 4

On the Slaney scale a mel is 200/3 Hz below 1,000 Hz; above, 27 mels are a factor of 6.4. The filters are triangles
between neighboring mels, each of area 1.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from subquad_lab.system.regular_file import open_regular

RATE = 16_000  # samples per second that the window and the hop are designed for
WINDOW, STEP, MELS = 400, 160, 80
LINEAR, LOGARITHMIC = 200 / 3, np.log(6.4) / 27  # Hz per mel below the corner; log(Hz) per mel above it
CORNER = 1000.0
MIN_SAMPLES = WINDOW // 2 + 1  # because the ends are mirrored
RATES = (4_000, 384_000)  # lowest and highest sample rate of a file
MAX_FILE_SECONDS = 2 * 3600  # A file is held in memory.
BLOCK_SAMPLES = 1 << 18  # read at a time
SILENCE_PEAK = 1e-4  # A clip whose peak is lower is silent.


def read_sound(path: Path, rate: int | None = RATE) -> Tensor:
    """Read an audio file as mono samples in [-1, 1], resampled to `rate`, or at its own rate if that is None.

    Raises:
        ValueError: If the file cannot be read, is truncated, too short or too long, or has non-finite samples.
    """
    import soundfile

    try:
        with open_regular(path) as content, soundfile.SoundFile(_whole(content, path), closefd=False) as file:
            own, promised = file.samplerate, file.frames
            if not RATES[0] <= own <= RATES[1]:
                raise ValueError(f"{path}: expected a sample rate of {RATES[0]:,} to {RATES[1]:,} Hz, got {own:,} Hz")
            if promised > MAX_FILE_SECONDS * min(own, 3 * RATE):
                hours = promised / own / 3600
                raise ValueError(f"{path}: expected at most {MAX_FILE_SECONDS // 3600} h, got {hours:,.1f} h")
            blocks = []
            while len(block := file.read(BLOCK_SAMPLES // file.channels + 1, dtype="float32", always_2d=True)):
                blocks.append(block.mean(1))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (soundfile.SoundFileError, TypeError, MemoryError) as error:
        why = getattr(error, "error_string", "") or error
        raise ValueError(f"{path}: not a valid audio file: {why}") from error
    mono = np.concatenate([np.zeros(0, np.float32), *blocks])
    if len(mono) < promised:
        raise ValueError(f"{path}: the file is truncated: expected {promised:,} samples, got {len(mono):,}")
    if len(mono) < MIN_SAMPLES:
        raise ValueError(f"{path}: expected at least {MIN_SAMPLES} samples, got {len(mono)}")
    if not np.isfinite(mono).all():
        raise ValueError(f"{path}: expected finite samples, got NaN or infinity")
    return torch.from_numpy(resampled(mono, own, rate or own))


def _whole(file: BinaryIO, path: Path) -> int:
    """Return the file's handle, for soundfile; raise if a wav file is shorter than its header says."""
    head, size = file.read(8), os.fstat(file.fileno()).st_size
    promised = int.from_bytes(head[4:], "little") + 8
    if not head:
        raise ValueError(f"{path}: the file is empty")
    # Streams of unknown length store the largest size, and some writers include the first eight bytes.
    if head[:4] == b"RIFF" and size < promised - 8 and promised < 2**32:
        raise ValueError(f"{path}: the file is truncated: expected {promised:,} bytes, got {size:,}")
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return file.fileno()


def resampled(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    """Resample with an anti-aliasing filter."""
    if own == rate:
        return samples
    from scipy.signal import resample_poly

    found: np.ndarray = resample_poly(samples, rate, own).astype(np.float32)
    return found


def features(samples: Tensor) -> Tensor:
    """Return log-mel features (frames, 80) in half precision; raise ValueError for silence."""
    if float(samples.abs().max()) < SILENCE_PEAK:
        raise ValueError("the clip is silent")
    return log_mel(samples).half()


def log_mel(samples: Tensor, rate: int = RATE) -> Tensor:
    """Return log-mel features (frames, 80) of samples (n), one frame per hop; raise ValueError on overflow.

    >>> log_mel(torch.zeros(16_000)).shape
    torch.Size([100, 80])
    """
    window = torch.hann_window(WINDOW)
    waves = torch.stft(samples, WINDOW, STEP, window=window, center=True, return_complex=True)
    power = waves[:, : len(samples) // STEP].abs() ** 2  # without the frame centered at the end
    logs = (mel_bank(rate) @ power).clamp(min=1e-10).log10()
    if not logs.isfinite().all():
        raise ValueError("the clip is too loud: its power is not finite")
    return ((logs.clamp(min=logs.max() - 8) + 4) / 4).T.contiguous()


@lru_cache(maxsize=4)
def mel_bank(rate: int) -> Tensor:
    """Return the weight of each frequency in each mel, (80, 201)."""
    corners = to_hertz(np.linspace(0, to_mels(np.array(rate / 2)), MELS + 2))
    frequencies = np.linspace(0, rate / 2, WINDOW // 2 + 1)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    triangles = np.minimum(rising, falling).clip(min=0)
    return torch.from_numpy(triangles * 2 / (high - low)).float()


def to_mels(hertz: np.ndarray) -> np.ndarray:
    above = CORNER / LINEAR + np.log(np.maximum(hertz, CORNER) / CORNER) / LOGARITHMIC
    return np.where(hertz < CORNER, hertz / LINEAR, above)


def to_hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < CORNER / LINEAR, mels * LINEAR, CORNER * np.exp(LOGARITHMIC * (mels - CORNER / LINEAR)))
