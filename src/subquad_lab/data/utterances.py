"""Split recordings into utterances with the loudness and the silences of the training clips.

    voiced      frames at most 40 dB below the loudest
    loudness    log10 of the mean power of the voiced frames, over all mels

The transcript thus does not depend on the volume of a recording or on the silence around the words.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad_lab.data.clips import Part
from subquad_lab.data.sound import RATE, SILENCE_PEAK, STEP, features, log_mel

VOICED_POWER = 1e-4  # relative to the loudest: -40 dB
SAMPLED_CLIPS = 1000  # to estimate the usual properties
PAUSE_QUANTILE = 0.9  # fraction of clips whose longest inner silence is at most the usual one
EXTRA_PAUSE_FRAMES = 5  # by which a silence between utterances exceeds the usual one
MIN_UTTERANCE_SAMPLES = RATE // 20  # Shorter sounds are clicks.


class Usual(NamedTuple):
    """Typical properties of the training clips; silences in frames."""

    loudness: float
    before: int
    after: int
    between: int  # longest silence within a clip


def usual(clips: Part) -> Usual:
    """Return the typical properties: medians, and a quantile of the longest silence within clips."""
    found = []
    for i in range(0, len(clips), -(-len(clips) // SAMPLED_CLIPS)):
        power = _power(clips[i])
        voiced = _voiced(power)
        longest = int(voiced.diff(prepend=voiced[:1] - 1).max()) - 1
        found.append([_loudness(power), int(voiced[0]), len(power) - 1 - int(voiced[-1]), longest])
    loudness, before, after, between = torch.tensor(found, dtype=torch.float64).unbind(1)
    return Usual(
        round(float(loudness.median()), 3),
        int(before.median()),
        int(after.median()),
        int(between.quantile(PAUSE_QUANTILE)),
    )


def _power(clip: Tensor) -> Tensor:
    """Return the power of each frame from its features."""
    return (10 ** (4 * clip.double() - 4)).sum(1)


def _voiced(power: Tensor) -> Tensor:
    """Return the indices of voiced frames."""
    return (power >= VOICED_POWER * power.max()).nonzero().flatten()


def _loudness(power: Tensor) -> float:
    return float(power[_voiced(power)].mean().log10())


def heard(samples: Tensor, like: Usual, longest: int) -> list[tuple[int, int, Tensor]]:
    """Split a recording into utterances.

    Args:
        samples: Samples of the recording.
        like: Properties that each utterance is adjusted to.
        longest: Maximum number of frames per utterance.

    Returns:
        Start and end in samples, and the features, of each utterance.

    Raises:
        ValueError: If no utterance is found.
    """
    peak = float(samples.abs().max())
    if peak < SILENCE_PEAK:
        raise ValueError("the recording is silent")
    samples, made = samples / peak, []
    for low, high in pieces(samples, longest - like.before - like.after, like.between + EXTRA_PAUSE_FRAMES):
        begin, end = _trimmed(samples, low, high)
        if end - begin < MIN_UTTERANCE_SAMPLES:
            continue
        first, last = begin - like.before * STEP, end + like.after * STEP
        clip = F.pad(samples[max(first, low) : min(last, high)], (max(low - first, 0), max(last - high, 0)))
        made.append((begin, end, features(_as_loud(clip, like.loudness)).float()))
    if not made:
        raise ValueError(f"no utterance of at least {MIN_UTTERANCE_SAMPLES / RATE:g} s")
    return made


def _as_loud(clip: Tensor, loudness: float) -> Tensor:
    clip = clip / clip.abs().max()  # makes the floor of the log-mel features independent of the volume
    return clip * 10 ** ((loudness - _loudness(_power(log_mel(clip)))) / 2)


def _trimmed(samples: Tensor, begin: int, end: int) -> tuple[int, int]:
    """Return the range without the silence at both ends."""
    voiced = _voiced(samples[begin:end] ** 2)
    return begin + int(voiced[0]), begin + int(voiced[-1]) + 1


def pieces(samples: Tensor, longest: int, pause: int) -> list[tuple[int, int]]:
    """Cut in the middle of each silence of more than `pause` frames, and cut pieces of more than `longest` frames.

    >>> sound, silence = torch.ones(16_000), torch.zeros(8_000)
    >>> pieces(torch.cat([silence, sound, silence, sound]), longest=300, pause=20)
    [(0, 28000), (28000, 48000)]
    """
    power = samples**2
    voiced = F.pad(power >= VOICED_POWER * power.max(), (0, -len(power) % STEP))
    steps = voiced.view(-1, STEP).any(1).nonzero().flatten()
    ends = (steps.diff() > pause + 1).nonzero().flatten()
    cuts = ((steps[ends] + 1 + steps[ends + 1]) * STEP // 2).tolist()
    bounds = [0]
    for low, high in pairwise([0, *cuts, len(samples)]):
        begin, end = _trimmed(samples, low, high)
        bounds += [begin + cut for cut in cuts_at_pauses(samples[begin:end], longest * STEP)] + [high]
    return list(pairwise(bounds))


def cuts_at_pauses(samples: Tensor, most: int) -> list[int]:
    """Return cuts such that no piece has more than `most` samples: in the quietest 0.1 s of its second half.

    >>> cuts_at_pauses(torch.cat([torch.ones(20_000), torch.zeros(3_200), torch.ones(10_000)]), most=32_000)
    [21600]
    """
    most, width = max(most, RATE // 2), RATE // 10
    if len(samples) <= most:
        return []
    power = F.avg_pool1d((samples**2)[None], width, STEP)[0]  # power[i]: of the 0.1 s from sample i * STEP on
    cuts = [0]
    while len(samples) - cuts[-1] > most:
        low, high = (cuts[-1] + most // 2) // STEP, (cuts[-1] + most - width) // STEP
        quiet = power[low:high]
        # the middle one of equally quiet positions
        best = (quiet == quiet.min()).nonzero().flatten()
        cuts.append((low + int(best[len(best) // 2])) * STEP + width // 2)
    return cuts[1:]
