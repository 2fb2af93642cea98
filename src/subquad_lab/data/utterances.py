"""One utterance at a time, with the loudness and the silence that a model knows from its training clips.

    voiced      what is at most 40 dB below the loudest
    loudness    log10 of the mean power of the voiced frames, over all mels

So neither the volume of a recording nor the silence around its words changes what is heard in it.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad_lab.data.clips import Part
from subquad_lab.data.sound import QUIET, RATE, STEP, features, log_mel

FAINT = 1e-4  # of the loudest power: 40 dB below it
FEW = 1000  # clips that say how all of them are
MOST = 0.9  # of the clips have no longer silence between two words than the usual one
LONGER = 5  # frames that a silence is longer than the usual one, where an utterance ends
CLICK = RATE // 20  # samples: what is shorter is no utterance


class Usual(NamedTuple):
    """What training clips have; silences in frames."""

    loudness: float
    before: int
    after: int
    between: int  # the longest within a clip


def usual(clips: Part) -> Usual:
    """Medians, but of the silences within clips."""
    found = []
    for i in range(0, len(clips), -(-len(clips) // FEW)):
        power = _power(clips[i])
        voiced = _voiced(power)
        longest = int(voiced.diff(prepend=voiced[:1] - 1).max()) - 1
        found.append([_loudness(power), int(voiced[0]), len(power) - 1 - int(voiced[-1]), longest])
    loudness, before, after, between = torch.tensor(found, dtype=torch.float64).unbind(1)
    return Usual(
        round(float(loudness.median()), 3), int(before.median()), int(after.median()), int(between.quantile(MOST))
    )


def _power(clip: Tensor) -> Tensor:
    """Of each frame, from its features."""
    return (10 ** (4 * clip.double() - 4)).sum(1)


def _voiced(power: Tensor) -> Tensor:
    """Where it is."""
    return (power >= FAINT * power.max()).nonzero().flatten()


def _loudness(power: Tensor) -> float:
    return float(power[_voiced(power)].mean().log10())


def heard(samples: Tensor, like: Usual, longest: int) -> list[tuple[int, int, Tensor]]:
    """Where each utterance begins and ends, in samples, and its features; ValueError where there is none.

    Args:
        samples: Of a file.
        like: How each of them is made to be.
        longest: Frames of one utterance.
    """
    peak = float(samples.abs().max())
    if peak < QUIET:
        raise ValueError("is silent")
    samples, made = samples / peak, []
    for low, high in pieces(samples, longest - like.before - like.after, like.between + LONGER):
        begin, end = _trimmed(samples, low, high)
        if end - begin < CLICK:
            continue
        first, last = begin - like.before * STEP, end + like.after * STEP
        clip = F.pad(samples[max(first, low) : min(last, high)], (max(low - first, 0), max(last - high, 0)))
        made.append((begin, end, features(_as_loud(clip, like.loudness)).float()))
    if not made:
        raise ValueError(f"has no sound of at least {CLICK / RATE:g} s")
    return made


def _as_loud(clip: Tensor, loudness: float) -> Tensor:
    clip = clip / clip.abs().max()  # The smallest powers have a floor, which is then the same at each volume.
    return clip * 10 ** ((loudness - _loudness(_power(log_mel(clip)))) / 2)


def _trimmed(samples: Tensor, begin: int, end: int) -> tuple[int, int]:
    """Without the silence at both ends."""
    voiced = _voiced(samples[begin:end] ** 2)
    return begin + int(voiced[0]), begin + int(voiced[-1]) + 1


def pieces(samples: Tensor, longest: int, pause: int) -> list[tuple[int, int]]:
    """Cut in the middle of each silence of more than `pause` frames; where more than `longest` are left, within them.

    >>> sound, silence = torch.ones(16_000), torch.zeros(8_000)
    >>> pieces(torch.cat([silence, sound, silence, sound]), longest=300, pause=20)
    [(0, 28000), (28000, 48000)]
    """
    power = samples**2
    steps = F.pad(power >= FAINT * power.max(), (0, -len(power) % STEP)).view(-1, STEP).any(1).nonzero().flatten()
    ends = (steps.diff() > pause + 1).nonzero().flatten()
    cuts = ((steps[ends] + 1 + steps[ends + 1]) * STEP // 2).tolist()
    bounds = [0]
    for low, high in pairwise([0, *cuts, len(samples)]):
        begin, end = _trimmed(samples, low, high)
        bounds += [begin + cut for cut in cuts_at_pauses(samples[begin:end], longest * STEP)] + [high]
    return list(pairwise(bounds))


def cuts_at_pauses(samples: Tensor, most: int) -> list[int]:
    """Where to cut so that no piece has more samples: in the quietest tenth of a second of its later half.

    >>> cuts_at_pauses(torch.cat([torch.ones(20_000), torch.zeros(3_200), torch.ones(10_000)]), most=32_000)
    [21600]
    """
    most, width = max(most, RATE // 2), RATE // 10
    if len(samples) <= most:
        return []
    power = F.avg_pool1d((samples**2)[None], width, STEP)[0]  # of the tenth from i * STEP on
    cuts = [0]
    while len(samples) - cuts[-1] > most:
        low, high = (cuts[-1] + most // 2) // STEP, (cuts[-1] + most - width) // STEP
        quiet = power[low:high]
        # Of equally quiet places the middle one.
        best = (quiet == quiet.min()).nonzero().flatten()
        cuts.append((low + int(best[len(best) // 2])) * STEP + width // 2)
    return cuts[1:]
