"""How near a text is to the one that was wanted. Of two sequences t (wanted) and g (given):

    jaccard    sum of the smaller counts / sum of the larger counts, over all characters
    cosine     sum of the smaller counts / sqrt(|t| |g|), which is Ochiai's coefficient
    damerau    1 - d / max(|t|, |g|), d the restricted Damerau-Levenshtein distance: insertions, deletions,
               replacements, and swaps of neighbors that are not edited again (optimal string alignment)
    error rate    insertions, deletions and replacements / |t|, over all texts together; of characters or of words

The first two see which characters there are and not their order.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import sqrt

from rapidfuzz.distance import OSA, Levenshtein

Text = Sequence[Hashable]


def jaccard(wanted: Text, given: Text) -> float:
    """
    >>> jaccard("aab", "abc")
    0.5
    """
    counts, others = Counter(wanted), Counter(given)
    return _share((counts & others).total(), (counts | others).total())


def cosine(wanted: Text, given: Text) -> float:
    """
    >>> cosine("aabb", "abcc")
    0.5
    """
    common = (Counter(wanted) & Counter(given)).total()
    return _share(common, sqrt(len(wanted) * len(given)), empty=float(len(wanted) == len(given)))


def damerau(wanted: Text, given: Text) -> float:
    """
    >>> damerau("abcd", "abdc")
    0.75
    """
    return 1.0 - _share(OSA.distance(wanted, given), max(len(wanted), len(given)), empty=0.0)


def error_rate(wanted: Sequence[Text], given: Sequence[Text]) -> float:
    """
    >>> error_rate(["abc", "d"], ["abd", "d"]), error_rate(["one two".split()], ["one".split()])
    (0.25, 0.5)
    """
    edits = sum(Levenshtein.distance(t, g) for t, g in zip(wanted, given, strict=True))
    return _share(edits, sum(map(len, wanted)), empty=0.0 if edits == 0 else 1.0)


def _share(part: float, whole: float, empty: float = 1.0) -> float:
    """With a value for texts that are empty: two of them are alike."""
    return part / whole if whole else empty
