"""The three similarities as they were published, and true error rates."""

import random

import pytest
import textdistance
from hypothesis import given
from hypothesis import strategies as st

from subquad_lab.figures.similarity import cosine, damerau, error_rate, jaccard

THEIRS = {
    jaccard: textdistance.Jaccard(qval=1, as_set=False).normalized_similarity,
    cosine: textdistance.Cosine(qval=1, as_set=False).normalized_similarity,
    damerau: textdistance.DamerauLevenshtein(qval=1, restricted=True).normalized_similarity,
}
TEXTS = st.lists(st.integers(0, 5), max_size=12)


@pytest.mark.parametrize("ours", THEIRS)
def test_a_thousand_pairs_equal_those_of_textdistance(ours):
    draw = random.Random(0)
    for _ in range(1000):
        one, other = ([chr(97 + draw.randrange(35)) for _ in range(draw.randint(2, 60))] for _ in range(2))
        if draw.random() < 0.7:  # near each other, with swaps
            other = one[:]
            for _ in range(draw.randint(0, 6)):
                i = draw.randrange(len(other) - 1)
                other[i], other[i + 1] = other[i + 1], draw.choice([other[i], chr(97 + draw.randrange(35))])
        theirs = THEIRS[ours]("".join(one), "".join(other))
        assert ours(one, other) == pytest.approx(theirs, abs=1e-12)


def test_swaps_that_are_edited_again_count_fully():
    """CA to ABC: the unrestricted distance is 2, the restricted one 3."""
    assert damerau("ca", "abc") == 0.0


@given(TEXTS, TEXTS)
def test_they_are_between_0_and_1_symmetric_and_1_for_the_same(one, other):
    for similarity in THEIRS:
        assert 0 <= similarity(one, other) <= 1
        assert similarity(one, other) == similarity(other, one)
        assert similarity(one, one) == 1


def test_order_matters_to_the_third_alone():
    assert jaccard("abcdef", "fedcba") == cosine("abcdef", "fedcba") == 1
    assert damerau("abcdef", "fedcba") < 0.5


def test_error_rates_are_over_all_texts_together():
    assert error_rate(["aaaa", "b"], ["aaaa", "c"]) == pytest.approx(1 / 5)  # and not the mean of 0 and 1
    assert error_rate(["ab"], ["ba"]) == 1.0  # a swap is two edits
    assert error_rate(["ab"], ["abab"]) == 1.0
    assert error_rate([""], [""]) == 0
    assert error_rate([""], ["a"]) == 1
    assert error_rate([["one", "two"]], [["one", "to"]]) == 0.5
