"""With positive weights an output lies between the values that it sees, and half precision ends at the door."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calls import METHODS, attended, by_causal_form, normal, normal_inputs, relative
from subquad import RandomFeatures, Taylor, attention

pytestmark = pytest.mark.usefixtures("one_thread")


# --- The hull: with positive weights an output lies between the values that it sees ----------------------------------

POSITIVE = [name for name, method in METHODS.items() if method.positive]
HULL_ROWS = 4 * 80 * 256  # of each method and form: four standard deviations, sequences, length


def outside_the_hull(method, form: str, std: float) -> tuple[int, int]:
    """How many rows lie outside the hull, of 80 * 256, and how many have a normalizer of exactly 0.

    A channel of ones among the values shows the normalizer: it is 1 where there is one, and 0 where not.
    """
    q, k = (normal(80, 1, 256, 8, seed=seed, std=std) for seed in (0, 1))
    v = normal(80, 1, 256, 3, seed=2)
    out = attended(method, q, k, F.pad(v, (0, 1), value=1.0), form=form)[0]
    empty = out[..., -1] == 0
    assert not bool(out[empty].any())
    low, high = v.cummin(-2).values, v.cummax(-2).values
    # The range is 0 where a row sees one key: there its value may be rounded.
    slack = 1e-5 * (high - low) + 1e-6 * v.abs()
    inside = ((out[..., :-1] >= low - slack) & (out[..., :-1] <= high + slack)).all(-1)  # False for NaN
    return int((~inside & ~empty).sum()), int(empty.sum())


def test_odd_taylor_leaves_the_hull():
    assert outside_the_hull(Taylor(3), "chunked", 2.0)[0] > 1000
    assert outside_the_hull(Taylor(3), "dense", 4.0)[0] > 4000


@pytest.mark.parametrize(("std", "share"), [(2.0, 0.04), (4.0, 0.28)])
def test_share_of_odd_taylors_normalizers_that_are_not_positive(std, share):
    """The figures for which odd degrees warn: width 8, length 256, causal."""
    method, root = Taylor(3), 8**-0.25
    q, k = (normal(64, 256, 8, seed=seed, std=std, dtype=torch.float64) for seed in (0, 1))
    v = normal(64, 256, 8, seed=2, dtype=torch.float64)
    normalizers = (method(q * root) * method(k * root).cumsum(-2)).sum(-1)
    assert (normalizers <= 0).double().mean().item() == pytest.approx(share, abs=0.015)
    with pytest.warns(UserWarning, match="weights can be negative"):
        out = attention(q, k, v, is_causal=True, method=method)
    assert out.abs().max() > 80 * v.abs().max()


@pytest.mark.parametrize("name", POSITIVE)
@by_causal_form
def test_positive_maps_stay_inside_the_hull(name, form):
    found = [outside_the_hull(METHODS[name], form, std) for std in (0.5, 1.0, 2.0, 4.0)]
    violations, empty = (sum(counts) for counts in zip(*found, strict=True))
    assert violations == 0
    assert (empty > 0) == (name == "relu")  # Queries or keys without a positive entry.
    assert 2 * len(POSITIVE) * HULL_ROWS >= 1_000_000


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("std", [0.5, 1.0, 2.0, 4.0])
def test_the_first_step_gives_the_value_itself(name, std):
    """The narrowest hull: a row that sees one key. The first token of a stream meets its key pair by pair, because the
    series near its minimum 1/2, summed from features, would be the small rest of large terms."""
    q, k = (normal(20_000, 1, 1, 8, seed=seed, std=std) for seed in (0, 1))
    v = normal(20_000, 1, 1, 3, seed=2)
    out, _ = attention(q, k, v, is_causal=True, method=METHODS[name], return_state=True)
    seen = out.flatten(1).any(1)  # relu: others have no normalizer
    assert bool(seen.all()) or name == "relu"
    assert bool(((out - v).abs() <= 1e-5 * v.abs().amax(-1, keepdim=True))[seen].all())


# --- Half precision ends at the door ---------------------------------------------------------------------------------


def in_half_precision(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fault: Taylor's features, sums and normalizer in the dtype of the inputs."""
    root = q.shape[-1] ** -0.25
    q_features, k_features = (Taylor(2)(x * root) for x in (q, k))
    values, sums, rows = F.pad(v, (0, 1), value=1.0), 0, []
    for i in range(len(q)):
        sums = sums + k_features[i, :, None] * values[i]
        rows.append(q_features[i] @ sums)
    totals = torch.stack(rows)
    return totals[:, :-1] / totals[:, -1:]


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_states_of_half_precision_inputs_are_wide(dtype, allowed):
    """10,000 tokens. `allowed` is the rounding of the output: half a unit in its last place."""
    q, k, v = (x.to(dtype) for x in normal_inputs(n=10_000, d=8, e=4))
    v = v + 1
    wide = attended(Taylor(2), q.double(), k.double(), v.double())[0]
    assert relative(in_half_precision(q, k, v), wide) > 10 * allowed
    for name, method in METHODS.items():
        out, state = attended(method, q, k, v, return_state=True)
        before_the_cast = attended(method, q.float(), k.float(), v.float(), return_state=True)[0]
        assert (out.dtype, state.sums.dtype) == (dtype, torch.float32)
        assert torch.equal(out, before_the_cast.to(dtype))
        if method.positive:  # The others divide by what is left of canceled terms.
            wide = attended(method, q.double(), k.double(), v.double())[0]
            assert relative(out, wide) <= allowed, name
            assert relative(before_the_cast, wide) <= 2e-6, name
        if state.log_scale is not None:
            assert state.log_scale.dtype == torch.float32


def test_states_of_float64_inputs_are_float64():
    for method in METHODS.values():
        out, state = attended(method, *normal_inputs(2, n=5, dtype=torch.float64), return_state=True)
        assert out.dtype == state.sums.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:.*far outside its range")
@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_of_huge_logits_are_shares(kind, is_causal):
    """The two passes of the backward round the log-scales of keys differently, by 1e30 and more."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = torch.randn(3, 1, 2, 40, 16, generator=generator)
        q, k, v = q * 1e18, (k * 1e18).requires_grad_(), v.requires_grad_()
        output = attention(q, k, v, is_causal=is_causal, method=RandomFeatures(34, kind))
        of_key, of_value = torch.autograd.grad(output.sum(), (k, v))
        assert of_key.isfinite().all() and float(of_value.abs().max()) <= 40.01  # shares of 40 queries
