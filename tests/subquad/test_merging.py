"""State.merge: the state of a whole from the states of its parts, in any grouping."""

import itertools
from typing import Any

import pytest
import torch

import subquad
from calls import Squares
from subquad import Hedgehog, Linear, RandomFeatures, Separable, State, Taylor

SUMS: dict[str, Any] = {
    "taylor": Taylor(2), "shifted": Taylor(2, key_shift=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)), "positive": RandomFeatures(20),
    "trigonometric": RandomFeatures(20, "trigonometric"), "elu": Linear(), "identity": Linear("identity"),
    "separable": Separable(), "user": Squares(), "hedgehog": Hedgehog(6, 4, key_heads=2).double(),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("has_segments", [False, True])
def test_merging_states_is_associative_and_gives_the_state_of_the_whole(name, has_segments) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3, 2, 60, 6, generator=generator, dtype=torch.float64).unbind()
    k[1, 0, 11, 2] = float("nan")  # poisons one head
    ids = torch.randint(0, 3, (3, 60), generator=generator).sort(1).values

    def state_of(start: int, end: int) -> State:
        part = slice(start, end)
        options = dict(segment_ids=ids[:, part]) if has_segments else {}
        options |= dict(is_causal=True, enable_gqa=True, method=SUMS[name], return_state=True)
        own = k[:, :, part], v[:, :, part]
        return subquad.attention(own[0].repeat_interleave(2, 1), *own, **options)[1]

    whole = state_of(0, 60)
    for cuts in ((0, 20, 40, 60), (0, 0, 59, 60), (0, 1, 1, 60), (0, 30, 60, 60)):
        a, b, c = (state_of(*both) for both in itertools.pairwise(cuts))
        for merged in (State.merge(State.merge(a, b), c), State.merge(a, State.merge(b, c))):
            assert merged.length == 60
            assert torch.equal(merged.poison.isnan(), whole.poison.isnan())
            true = [x.sums * (1 if x.log_scale is None else x.log_scale.exp()[..., None]) for x in (merged, whole)]
            torch.testing.assert_close(*true, rtol=1e-10, atol=1e-10)
            if has_segments:
                assert torch.equal(merged.segment, whole.segment) and torch.equal(merged.is_whole, whole.is_whole)


def test_states_that_do_not_fit_are_not_merged() -> None:
    def state_of(method: Any, **options: Any) -> State:
        q, k, v = torch.randn(3, 1, 2, 10, 8, generator=torch.Generator().manual_seed(0))
        return subquad.attention(q, k, v, is_causal=True, method=method, return_state=True, **options)[1]

    taylor = state_of("taylor")
    with pytest.raises(ValueError, match="merge: expected states of a feature method, which hold sums, got one of"):
        State.merge(state_of("exact"), state_of("exact"))
    with pytest.raises(ValueError, match="state: expected one made by"):
        State.merge(taylor, state_of("taylor:4"))
    with pytest.raises(ValueError, match="scale: expected"):
        State.merge(taylor, state_of("taylor", scale=1.0))
    with pytest.raises(ValueError, match="merge: expected sums of one shape"):
        State.merge(taylor, taylor[torch.tensor([0, 0])])
    with pytest.raises(ValueError, match="merge: expected two states made with segment_ids"):
        State.merge(taylor, state_of("taylor", segment_ids=torch.zeros(1, 10, dtype=torch.long)))
