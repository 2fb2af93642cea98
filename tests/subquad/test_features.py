"""Feature maps against the kernels that they name."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.kernel_approximation import RBFSampler

from subquad import Linear, RandomFeatures, Taylor, optimal_scale
from subquad.methods.projections import drawn as drawn_once
from subquad.methods.taylor import _symmetric_weights


def exponents(width: int, degree: int) -> list[tuple[int, ...]]:
    """All monomials up to a degree, enumerated."""
    return [c for p in range(degree + 1) for c in itertools.combinations_with_replacement(range(width), p)]


@given(degree=st.integers(0, 6), width=st.integers(1, 8), seed=st.integers(0, 1000))
def test_taylor_equals_the_truncated_series(degree, width, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 3, width, generator=generator, dtype=torch.float64).unbind()
    method = Taylor(degree)
    features = method(q), method(k)
    assert features[0].shape[-1] == method.size(width) == len(exponents(width, degree))
    x = q @ k.mT
    series = sum(x**p / math.factorial(p) for p in range(degree + 1))
    scale = sum(x.abs() ** p / math.factorial(p) for p in range(degree + 1)).max()
    assert (features[0] @ features[1].mT - series).abs().max() <= 1e-12 * scale
    torch.testing.assert_close(method.series(x), series, rtol=1e-12, atol=1e-12)


def test_each_feature_is_a_weighted_monomial() -> None:
    """Not only their products: one by one, in some order, with weights 1/sqrt(prod k_i!)."""
    x = torch.tensor([[0.5, 1.25, -2.0]], dtype=torch.float64)
    wanted = [
        math.prod(x[0, i].item() for i in c) / math.sqrt(math.prod(math.factorial(c.count(i)) for i in set(c)))
        for c in exponents(3, 4)
    ]
    assert sorted(Taylor(4)(x)[0].tolist()) == pytest.approx(sorted(wanted), abs=1e-14)
    assert len(_symmetric_weights(3, 4, torch.float64, torch.device("cpu"))) == math.comb(7, 4)


def test_diagonal_basis_drops_the_cross_terms() -> None:
    q, k = torch.ones(2, 1, 6, dtype=torch.float64)
    method = Taylor(2, basis="diagonal")
    assert method.size(6) == 13
    # For ones, (sum of products)^2 is 36, but the sum of squared products is 6.
    assert (method(q) @ method(k).mT).item() == pytest.approx(1 + 6 + 6 / 2)
    assert (Taylor(2)(q) @ Taylor(2)(k).mT).item() == pytest.approx(1 + 6 + 36 / 2)


def test_trigonometric_features_agree_with_an_independent_library() -> None:
    """scikit-learn estimates exp(-|q-k|^2/2), which is ours without the norms."""
    x = np.random.default_rng(0).normal(size=(6, 4)) * 0.5
    sampler = RBFSampler(gamma=0.5, n_components=20000, random_state=0).fit(x)
    theirs = sampler.transform(x) @ sampler.transform(x).T
    features, _ = RandomFeatures(20000, kind="trigonometric", coupling="independent")(torch.tensor(x))
    ours = (features @ features.mT / 10000).numpy()
    exact = np.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / 2)
    assert np.abs(ours - exact).mean() < 0.01
    assert np.abs(ours - exact).max() < 0.05
    assert np.abs(theirs - exact).max() < 0.05


@given(rows=st.integers(1, 20), width=st.integers(1, 6), seed=st.integers(0, 5))
def test_orthogonal_blocks(rows, width, seed) -> None:
    matrix = RandomFeatures(rows, seed=seed).draw(width)
    assert matrix.shape == (rows, width)
    for start in range(0, rows, width):
        block = matrix[start : start + width]
        gram = block @ block.mT
        assert (gram - torch.diag(gram.diagonal())).abs().max() < 1e-10
    assert torch.equal(matrix, RandomFeatures(rows, seed=seed).draw(width))
    assert not torch.equal(matrix, RandomFeatures(rows, seed=seed).redraw(seed + 1).draw(width))


def test_orthogonal_lengths_and_directions_are_those_of_normal_vectors() -> None:
    matrix = torch.cat([RandomFeatures(8, seed=seed).draw(8) for seed in range(500)])
    lengths = matrix.square().sum(-1)  # chi-square with 8 degrees of freedom: mean 8, variance 16
    assert lengths.mean().item() == pytest.approx(8, abs=0.3)
    assert lengths.var().item() == pytest.approx(16, rel=0.15)
    assert matrix.mean(0).abs().max() < 0.06  # Without the sign of the triangle, some directions lean to one side.
    first_rows = matrix[::8]
    assert first_rows.mean(0).abs().max() < 0.2


@given(rows=st.integers(1, 20), width=st.integers(1, 6), seed=st.integers(0, 5))
def test_simplex_blocks(rows, width, seed) -> None:
    """The draws of a block, also of a short one at the end, point to the corners of a regular simplex."""
    matrix = RandomFeatures(rows, coupling="simplex", seed=seed).draw(width)
    assert matrix.shape == (rows, width)
    for block in matrix.split(width):
        m = len(block)
        directions = block / block.norm(dim=-1, keepdim=True)
        cosines = (directions @ directions.mT)[~torch.eye(m, dtype=torch.bool)]
        assert m == 1 or (cosines + 1 / (m - 1)).abs().max() < 1e-10


@pytest.mark.parametrize("coupling", ["orthogonal", "simplex"])
def test_each_coupled_draw_alone_is_normal(coupling) -> None:
    """In full blocks and in a short one: length and direction of each of 11 rows of width 8, over 800 draws."""
    matrix = torch.stack([RandomFeatures(11, coupling=coupling, seed=seed).draw(8) for seed in range(800)])
    covariance = torch.einsum("srd,sre->rde", matrix, matrix) / 800
    assert (covariance - torch.eye(8)).abs().max() < 0.25  # five standard errors of an entry of the diagonal
    assert (matrix.square().sum(-1).var(0) / 16 - 1).abs().max() < 0.3  # chi-square with 8 degrees of freedom
    assert matrix.mean(0).abs().max() < 0.15


def test_drawing_leaves_the_global_generator_alone_and_is_kept() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    method = RandomFeatures(12, seed=99)
    drawn = method.draw(5)
    drawn.zero_()  # A copy: the kept one does not change.
    assert method.draw(5).abs().sum() > 0
    assert torch.equal(before, torch.get_rng_state())
    kept = (12, 5, "orthogonal", 99, torch.float64, torch.device("cpu"))
    assert drawn_once(*kept) is drawn_once(*kept)


def test_a_stored_matrix_replaces_the_draw() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    method = RandomFeatures(4, seed=5)
    stored = RandomFeatures(4, seed=0, matrix=method.draw(3))
    assert torch.equal(stored(x)[0], method(x)[0])
    with pytest.raises(ValueError, match=r"matrix: expected shape \(4, 3\), got \(4, 2\)"):
        RandomFeatures(4, matrix=torch.zeros(4, 2))(x)


def test_linear_activations() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0])
    assert torch.equal(Linear("identity")(x), x)
    torch.testing.assert_close(Linear("elu")(x), torch.tensor([math.exp(-2.0), 1.0, 4.0]))
    assert torch.equal(Linear("relu")(x), torch.tensor([0.0, 0.0, 3.0]))
    assert [Linear(a).positive for a in ("identity", "elu", "relu")] == [False, True, True]


def test_positive_says_what_the_kernels_are() -> None:
    assert [Taylor(p).positive for p in range(5)] == [True, False, True, False, True]
    assert not Taylor(2, basis="diagonal").positive
    kinds = ("positive", "hyperbolic", "trigonometric")
    assert [RandomFeatures(8, kind=kind).positive for kind in kinds] == [True, True, False]


def test_methods_are_values() -> None:
    assert Taylor(2) == Taylor(2) != Taylor(4)
    assert hash(RandomFeatures(8)) == hash(RandomFeatures(8))
    assert Taylor(2, key_shift=[1.0, 2.0]) == Taylor(2, key_shift=torch.tensor([1.0, 2.0])) != Taylor(2)
    assert Taylor(2, key_shift=torch.ones(2, 3)).key_shift == ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Taylor(-1), "degree: expected an integer >= 0, the highest power, got -1"),
        (lambda: Taylor(1.5), "degree"),
        (lambda: Taylor(True), "degree"),
        (lambda: Taylor(2, basis="full"), "basis: expected one of 'symmetric', 'diagonal', got 'full'"),
        (lambda: RandomFeatures(0), "num_features: expected a positive integer, got 0"),
        (lambda: RandomFeatures(7, kind="hyperbolic"), "hyperbolic features come in pairs"),
        (lambda: RandomFeatures(7, kind="trigonometric"), "trigonometric features come in pairs"),
        (lambda: RandomFeatures(8, kind="cosine"), "kind: expected one of"),
        (lambda: RandomFeatures(8, seed="x"), "seed: expected an integer"),
        (lambda: RandomFeatures(8, coupling="coupled"), "coupling: expected one of 'orthogonal', 'simplex'"),
        (lambda: RandomFeatures(8, scale=0.125), 'scale: expected a number below 0.125 or "auto", got 0.125'),
        (lambda: RandomFeatures(8, scale=math.nan), "scale: expected a number below 0.125"),
        (lambda: RandomFeatures(8, scale=-math.inf), "scale: expected a number below 0.125"),
        (lambda: RandomFeatures(8, scale="best"), "scale: expected a number below 0.125"),
        (lambda: RandomFeatures(8, scale=True), "scale: expected a number below 0.125"),
        (lambda: RandomFeatures(8, "trigonometric", scale="auto"), "scale: trigonometric features have none"),
        (lambda: optimal_scale(8, -1.0), "squared_norm: expected a finite number >= 0, got -1.0"),
        (lambda: optimal_scale(8, math.inf), "squared_norm: expected a finite number >= 0, got inf"),
        (lambda: optimal_scale(-1, 1.0), "width: expected an integer >= 0, got -1"),
        (lambda: Linear("gelu"), "activation: expected one of"),
        (lambda: Taylor(2, key_shift=torch.zeros(2, 2, 2)), "key_shift"),
        (lambda: Taylor(2, key_shift=[float("nan")]), "key_shift"),
        (lambda: Taylor(2, key_shift=(float("nan"),)), "key_shift"),
        (lambda: Taylor(2, key_shift=("a",)), "key_shift"),
    ],
)
def test_nonsense_is_refused_by_name(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
