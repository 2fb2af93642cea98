"""Sound files, and what the encoder sees of them.

    power = |stft|^2 (Hann window of 400 samples, a step of 160, centered)  ->  80 mels  ->  log10, at least 1e-10
    ->  at least the clip's largest value - 8  ->  (x + 4) / 4

On Slaney's scale a mel is 200/3 Hz below 1,000 Hz; above, 27 mels are a factor of 6.4. The filters are triangles
between neighboring mels, each of area 1.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

RATE = 16_000  # samples per second that the window and the step are made for
WINDOW, STEP, MELS = 400, 160, 80
LINEAR, LOGARITHMIC = 200 / 3, np.log(6.4) / 27  # Hz per mel below the corner; per mel above it, of the logarithm
CORNER = 1000.0
SHORTEST = WINDOW // 2 + 1  # samples: the ends are mirrored
RATES = (4_000, 384_000)  # that a file may have
LONGEST = 2 * 3600  # seconds of one file, which is in memory as a whole
BLOCK = 1 << 18  # samples that are read at once
QUIET = 1e-4  # A clip that never gets louder is silent.


def read_sound(path: Path, rate: int | None = RATE) -> Tensor:
    """Samples from -1 to 1 at a rate, or at the file's own; channels are averaged. ValueError says what is wrong."""
    import soundfile

    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "there is no such file"
        raise ValueError(f"{path}: {what}")
    _check_whole(path)
    try:
        with soundfile.SoundFile(path) as file:
            own, promised = file.samplerate, file.frames
            if not RATES[0] <= own <= RATES[1]:
                raise ValueError(f"{path}: has {own:,} samples per second; expected {RATES[0]:,} to {RATES[1]:,}")
            if promised > LONGEST * min(own, 3 * RATE):
                raise ValueError(f"{path}: lasts {promised / own / 3600:,.1f} h; expected at most {LONGEST // 3600} h")
            blocks = []
            while len(block := file.read(BLOCK // file.channels + 1, dtype="float32", always_2d=True)):
                blocks.append(block.mean(1))
    except (soundfile.SoundFileError, OSError, TypeError, MemoryError) as error:
        why = getattr(error, "error_string", "") or getattr(error, "strerror", "") or error
        raise ValueError(f"{path}: cannot be read as sound: {why}") from error
    mono = np.concatenate([np.zeros(0, np.float32), *blocks])
    if len(mono) < promised:
        raise ValueError(f"{path}: is cut off: it has {len(mono):,} of {promised:,} samples")
    if len(mono) < SHORTEST:
        raise ValueError(f"{path}: has {len(mono)} samples; expected at least {SHORTEST}")
    if not np.isfinite(mono).all():
        raise ValueError(f"{path}: has samples that are not finite")
    return torch.from_numpy(resampled(mono, own, rate or own))


def _check_whole(path: Path) -> None:
    """A wav file says in its head how long it is; what reads it takes a shorter one for whole."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    size, promised = path.stat().st_size, int.from_bytes(head[4:], "little") + 8
    if not head:
        raise ValueError(f"{path}: is empty")
    # A stream that did not know its length says the most; and some count the first eight bytes too.
    if head[:4] == b"RIFF" and size < promised - 8 and promised < 2**32:
        raise ValueError(f"{path}: is cut off: it has {size:,} of {promised:,} bytes")


def resampled(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    """At another rate, without the tones that it cannot hold."""
    if own == rate:
        return samples
    from scipy.signal import resample_poly

    found: np.ndarray = resample_poly(samples, rate, own).astype(np.float32)
    return found


def features(samples: Tensor) -> Tensor:
    """(frames, 80) in half precision, as they are kept; ValueError where there is nothing to hear."""
    if float(samples.abs().max()) < QUIET:
        raise ValueError("is silent")
    return log_mel(samples).half()


def log_mel(samples: Tensor, rate: int = RATE) -> Tensor:
    """(frames, 80) of samples (n); a frame for each step that has begun. ValueError if they overflow.

    >>> log_mel(torch.zeros(16_000)).shape
    torch.Size([100, 80])
    """
    window = torch.hann_window(WINDOW)
    waves = torch.stft(samples, WINDOW, STEP, window=window, center=True, return_complex=True)
    power = waves[:, : len(samples) // STEP].abs() ** 2  # The frame that begins at the very end is left out.
    logs = (mel_bank(rate) @ power).clamp(min=1e-10).log10()
    if not logs.isfinite().all():
        raise ValueError("is too loud: its power is not finite")
    return ((logs.clamp(min=logs.max() - 8) + 4) / 4).T.contiguous()


@lru_cache(maxsize=4)
def mel_bank(rate: int) -> Tensor:
    """(80, 201): the weight of each frequency in each mel."""
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
