"""What is heard in a recording depends neither on its volume nor on the silence around the words."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_runs import tone
from subquad_lab.data.clips import Part
from subquad_lab.data.espeak import Speaker
from subquad_lab.data.sound import RATE, STEP, log_mel, resampled
from subquad_lab.data.utterances import MIN_UTTERANCE_SAMPLES, Usual, cuts_at_pauses, heard, pieces, usual

LIKE = Usual(loudness=0.9, before=2, after=3, between=15)


@pytest.fixture(scope="module")
def speech() -> torch.Tensor:
    with Speaker() as speaker:
        said = np.frombuffer(speaker.say("six thousand eight hundred and seventy one"), np.int16)
    return torch.from_numpy(resampled(said.astype(np.float32) / 2**15, speaker.rate, RATE))


def part_of(clips: list[torch.Tensor]) -> Part:
    made = [log_mel(clip).half() for clip in clips]
    names = [str(i) for i in range(len(made))]
    return Part(torch.cat(made), torch.tensor([len(clip) for clip in made]).cumsum(0), names, names)


def silence(seconds: float) -> torch.Tensor:
    return torch.zeros(int(seconds * RATE))


# --- Volume and silence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("volume", [1e-3, 0.1, 0.3, 5.0, 1000.0, 1e25])
def test_the_volume_does_not_matter(speech, volume):
    ((_, _, wanted),) = heard(speech, LIKE, 1000)
    ((_, _, found),) = heard(volume * speech, LIKE, 1000)
    assert (found - wanted).abs().max() < 2e-3  # half precision


@pytest.mark.parametrize(("before", "after"), [(0.05, 0), (0, 0.25), (0.5, 0.5), (1.2345, 2.0001)])
def test_silence_around_the_words_does_not_matter(speech, before, after):
    ((begin, end, wanted),) = heard(speech, LIKE, 1000)
    ((later, last, found),) = heard(torch.cat([silence(before), speech, silence(after)]), LIKE, 1000)
    assert torch.equal(found, wanted)
    assert later - begin == last - end == len(silence(before))


def test_a_hiss_in_the_silence_does_not_matter(speech):
    hiss = 1e-3 * float(speech.abs().max()) * torch.randn(RATE, generator=torch.Generator().manual_seed(0))
    ((begin, end, wanted),) = heard(speech, LIKE, 1000)
    ((later, last, found),) = heard(torch.cat([hiss, speech, hiss]), LIKE, 1000)
    assert later - begin == last - end == RATE
    assert (found - wanted)[2:-3].abs().max() < 0.05


def test_what_is_heard_is_as_usual(speech):
    """Measured as the training clips are, from features alone."""
    ((_, _, found),) = heard(torch.cat([silence(0.4), 0.01 * speech, silence(0.3)]), LIKE, 1000)
    ends = torch.tensor([len(found)])
    again = usual(Part(found.half(), ends, [""], [""]))
    assert again.loudness == pytest.approx(LIKE.loudness, abs=2e-3)
    assert LIKE.before - 1 <= again.before <= LIKE.before  # A frame sees the voice before it begins.
    assert abs(again.after - LIKE.after) <= 1


def test_the_usual_clip_is_that_of_most():
    word = torch.from_numpy(tone(400, 0.3, RATE))
    clips = [torch.cat([silence(0.1), word, silence(0.2), word, silence(0.05)])] * 9 + [silence(0.3)]
    clips[-1][1000:2000] = 0.5  # an odd one
    found = usual(part_of(clips))
    assert found.before in (9, 10)
    assert found.after in (3, 4)  # A frame sees what was just before it.
    assert found.between in (17, 18)
    louder = usual(part_of([10 * clip for clip in clips]))
    assert louder.loudness - found.loudness == pytest.approx(2, abs=5e-3)  # of the power, in powers of ten
    assert louder[1:] == found[1:]


def test_a_clip_without_pauses_has_none_between_its_words():
    assert usual(part_of([torch.from_numpy(tone(400, 0.3, RATE))])).between == 0


# --- Pieces -------------------------------------------------------------------------------------------------------


def test_each_utterance_is_a_piece_of_its_own(speech):
    """Three clips joined with half a second between are heard as each of them alone, wherever they begin."""
    joined = torch.cat([silence(0.123), *[torch.cat([speech * volume, silence(0.5)]) for volume in (1, 0.2, 1)]])
    found = heard(joined, LIKE, 1000)
    assert len(found) == 3
    ((_, _, alone),) = heard(speech, LIKE, 1000)
    for _, _, features in found:
        assert (features - alone).abs().max() < 2e-3


def test_pauses_as_usual_stay_within_a_piece():
    word = torch.from_numpy(tone(400, 0.3, RATE))
    for pause, count in ((0.15, 1), (0.25, 2)):
        assert len(heard(torch.cat([word, silence(pause), word]), LIKE, 1000)) == count


def test_a_piece_holds_nothing_of_its_neighbors():
    """Where one is cut within a word, what should be silence around it is."""
    samples = torch.from_numpy(tone(400, 3.0, RATE))
    (_, _, first), *_ = heard(samples, LIKE._replace(after=10), 120)
    assert len(first) <= 120
    assert (first[-6:] == first.min()).all()  # no tone in its last frames


def test_clicks_are_no_utterances(speech):
    click = torch.zeros(RATE)
    click[8000:8100] = 0.5
    assert len(heard(torch.cat([click, speech, silence(0.5)]), LIKE, 1000)) == 1
    with pytest.raises(ValueError, match=f"no utterance of at least {MIN_UTTERANCE_SAMPLES / RATE:g} s"):
        heard(click, LIKE, 1000)
    with pytest.raises(ValueError, match="is silent"):
        heard(silence(1), LIKE, 1000)


@given(st.integers(300, 90_000), st.integers(50, 300), st.integers(0, 10))
@settings(max_examples=100, deadline=None)
def test_pieces_are_whole_and_no_longer_than_asked(length, longest, seed):
    samples = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    found = pieces(samples, longest, 15)
    assert found[0][0] == 0
    assert found[-1][1] == length
    assert all(end == begin for (_, end), (begin, _) in pairwise(found))
    sizes = [end - begin for begin, end in found]
    assert max(sizes) <= longest * STEP + 200  # and what is faint at its ends
    assert all(size >= longest * STEP / 2 - RATE / 10 for size in sizes[:-1])


def test_long_ones_are_cut_where_it_is_quiet():
    sound, pause = torch.ones(RATE), torch.full((RATE // 4,), 0.1)
    for cut in cuts_at_pauses(torch.cat([sound, pause] * 5), 2 * RATE):
        assert RATE < cut % (RATE + RATE // 4) < RATE + RATE // 4
