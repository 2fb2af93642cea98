"""Sequences whose answers they contain: each target is found again by plain Python."""

import pytest
import torch

from subquad_lab.data.recall import IGNORED, draw, max_pairs, min_length

ROWS, PAIRS, LENGTH, VOCABULARY = 20, 5, 24, 16


def drawn(task: str, *seed: object) -> tuple[list[list[int]], list[list[int]]]:
    tokens, targets = draw(task, ROWS, PAIRS, LENGTH, VOCABULARY, seed)
    return tokens.tolist(), targets.tolist()


def test_each_key_is_asked_for_once_and_its_value_is_the_target():
    for tokens, targets in zip(*drawn("recall", 0), strict=True):
        pairs = dict(zip(tokens[0 : 2 * PAIRS : 2], tokens[1 : 2 * PAIRS : 2], strict=True))
        assert len(pairs) == PAIRS
        assert all(key < VOCABULARY // 2 <= value for key, value in pairs.items())
        assert targets[: 2 * PAIRS] == [IGNORED] * 2 * PAIRS
        later = list(zip(tokens, targets, strict=True))[2 * PAIRS :]
        assert sorted(token for token, target in later if target != IGNORED) == sorted(pairs)
        for token, target in later:
            assert target == pairs.get(token, IGNORED)  # A key of a pair is always a query.


def test_a_copy_is_at_the_end():
    for tokens, targets in zip(*drawn("copy", 0), strict=True):
        originals = tokens[:PAIRS]
        assert tokens[PAIRS:-PAIRS] == [0] * (LENGTH - 2 * PAIRS)
        assert tokens[-PAIRS:] == [1, *originals[:-1]]
        assert targets == [IGNORED] * (LENGTH - PAIRS) + originals


def test_induction_asks_for_what_followed_the_last_time():
    for tokens, targets in zip(*drawn("induction", 0), strict=True):
        assert len(set(tokens)) <= PAIRS
        for t, token in enumerate(tokens):
            before = [s for s in range(t) if tokens[s] == token]
            assert targets[t] == (tokens[before[-1] + 1] if before else IGNORED)


@pytest.mark.parametrize("task", ["recall", "copy", "induction"])
def test_parts_and_seeds_have_their_own_sequences(task):
    one = drawn(task, "train", 0, 0, 0)
    assert one == drawn(task, "train", 0, 0, 0)
    for other in (("valid",), ("test",), ("train", 1, 0, 0), ("train", 0, 1, 0), ("train", 0, 0, 1)):
        assert drawn(task, *other) != one
    state = torch.random.get_rng_state()
    drawn(task, 0)
    assert torch.equal(state, torch.random.get_rng_state())  # The numbers of the model are not touched.


@pytest.mark.parametrize("task", ["recall", "copy", "induction"])
def test_the_smallest_sequences_and_vocabularies_are_enough(task):
    vocabulary = 8
    pairs = max_pairs(task, vocabulary)
    tokens, targets = draw(task, 4, pairs, min_length(task, pairs), vocabulary, (0,))
    assert tokens.shape == targets.shape == (4, min_length(task, pairs))
    assert int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary
    assert (targets != IGNORED).any(1).all()
