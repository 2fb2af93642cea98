"""Similarity of a text g (given) to its reference t (wanted).

    jaccard    sum of the smaller counts / sum of the larger counts, over all characters
    cosine     sum of the smaller counts / sqrt(|t| |g|), the Ochiai coefficient
    damerau    1 - d / max(|t|, |g|), d the restricted Damerau-Levenshtein distance: insertions, deletions,
               substitutions, and transpositions of adjacent characters (optimal string alignment)
    error rate    (insertions + deletions + substitutions) / |t|, over all texts; of characters or of words

The first two ignore the order of the characters.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import sqrt

from rapidfuzz.distance import OSA, Levenshtein

Text = Sequence[Hashable]


def jaccard(wanted: Text, given: Text) -> float:
    """Return the Jaccard similarity of the character counts.

    >>> jaccard("aab", "abc")
    0.5
    """
    counts, others = Counter(wanted), Counter(given)
    return _share((counts & others).total(), (counts | others).total())


def cosine(wanted: Text, given: Text) -> float:
    """Return the Ochiai coefficient of the character counts.

    >>> cosine("aabb", "abcc")
    0.5
    """
    common = (Counter(wanted) & Counter(given)).total()
    return _share(common, sqrt(len(wanted) * len(given)), empty=float(len(wanted) == len(given)))


def damerau(wanted: Text, given: Text) -> float:
    """Return the similarity from the restricted Damerau-Levenshtein distance.

    >>> damerau("abcd", "abdc")
    0.75
    """
    return 1.0 - _share(OSA.distance(wanted, given), max(len(wanted), len(given)), empty=0.0)


def error_rate(wanted: Sequence[Text], given: Sequence[Text]) -> float:
    """Return the error rate over all texts: of characters for strings, of words for lists of words.

    >>> error_rate(["abc", "d"], ["abd", "d"]), error_rate(["one two".split()], ["one".split()])
    (0.25, 0.5)
    """
    edits = sum(Levenshtein.distance(t, g) for t, g in zip(wanted, given, strict=True))
    return _share(edits, sum(map(len, wanted)), empty=0.0 if edits == 0 else 1.0)


def _share(part: float, whole: float, empty: float = 1.0) -> float:
    """Return part / whole, or `empty` if both texts are empty; the default makes them equal."""
    return part / whole if whole else empty
