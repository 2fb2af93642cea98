"""Feature maps whose inner product is the exponential, exactly or approximately.

series     phi(q).phi(k) = 1 + q.k + ... + (q.k)^K / K!         M = C(D + K, K) monomials
random     phi(q).phi(k) = exp(q.k) on average                  m draws x ~ N(0, I), exp(x.y - |y|^2/2) / sqrt(m)

softmax(Q K^T) V = D^-1 A V,    phi(Q) (phi(K)^T V) = (phi(Q) phi(K)^T) V
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad import Exact, RandomFeatures, Taylor
from subquad_lab.figures.plots import axes_of, svg
from subquad_lab.theory.claims import Finding, Setting, at_least, at_most, claim, equal, small
from subquad_lab.theory.counting import ORDERS, Term, attention, counted, misfit, written
from subquad_lab.theory.inputs import ROUNDING, distance, farthest, normal

# --- 4: the series ------------------------------------------------------------------------------------------------


def monomials(width: int, degree: int) -> list[tuple[int, ...]]:
    """Enumerate the exponents of all monomials up to this degree."""
    found = []
    for power in range(degree + 1):
        for variables in combinations_with_replacement(range(width), power):
            found.append(tuple(variables.count(i) for i in range(width)))
    return found


def feature_count(width: int, degree: int) -> int:
    return math.comb(width + degree, degree)


def feature_count_of_degree_2(width: int) -> int:
    return 1 + width + width * (width + 1) // 2


def diagonal_count(width: int, degree: int) -> int:
    return degree * width + 1


def monomial_weight(exponents: tuple[int, ...]) -> float:
    """Return the coefficient of a monomial of q times the same monomial of k."""
    return 1 / math.prod(math.factorial(k) for k in exponents)


def series(x: Tensor, degree: int) -> Tensor:
    return sum((x**power / math.factorial(power) for power in range(degree + 1)), torch.zeros_like(x))


@claim(
    4, "The truncated Maclaurin series of exp(q.k) is an inner product of features: all monomials, including cross "
       "terms, "
    "with weights 1 / sqrt(product of factorials of the exponents).",
    r"\phi(q) \cdot \phi(k) = \sum_{n \le K} \frac{(q \cdot k)^n}{n!}, \quad M = \binom{D + K}{K}, \quad "
    r"M = 1 + D + \frac{D (D + 1)}{2} \text{ for } K = 2",
    "M = K D + 1 features suffice, the powers of each variable without cross terms; or (sum a)^2 <= sum a^2 by "
    "Cauchy-Schwarz.",
)  # fmt: skip
def maclaurin(setting: Setting) -> Finding:
    width, degree = setting.of(3, 5, 8), 4
    q, k = normal(2, 6, width, seed=setting.seed, spread=0.7)
    wanted = series(q @ k.mT, degree)
    of_q, of_k = Taylor(degree)(q, is_query=True), Taylor(degree)(k, is_query=False)
    of_library = distance(of_q @ of_k.mT, wanted)
    exponents = monomials(width, degree)
    powers = torch.tensor(exponents, dtype=torch.float64)
    weights = torch.tensor([monomial_weight(each) for each in exponents], dtype=torch.float64)
    by_hand = (q[:, None] ** powers).prod(-1) * weights @ (k[:, None] ** powers).prod(-1).mT
    diagonal = Taylor(degree, basis="diagonal")
    of_diagonal = distance(diagonal(q, is_query=True) @ diagonal(k, is_query=False).mT, wanted)
    ones, drawn = torch.ones(width), normal(1000, width, seed=setting.seed)
    shares = drawn.sum(-1) ** 2 / (drawn**2).sum(-1)
    return Finding(
        [
            equal(f"monomials of degree {degree} at width {width}, enumerated", len(set(exponents)),
                  feature_count(width, degree)),
            equal("features of the library", of_q.shape[-1], feature_count(width, degree)),
            equal("features of the library, degree 2, width 64", Taylor(2)(torch.ones(1, 64)).shape[-1],
                  feature_count_of_degree_2(64)),
            at_most("features of the library, relative deviation from the series", of_library, ROUNDING),
            at_most("weighted monomials, relative deviation from the series", distance(by_hand, wanted), ROUNDING),
            at_most("(sum a)^2 / (D sum a^2), maximum over 1,000 vectors", float(shares.max()) / width, 1.0),
            equal("monomials, compared to K D + 1", len(set(exponents)), diagonal_count(width, degree), mistake=True),
            at_most("diagonal map, relative deviation from the series", of_diagonal, ROUNDING, mistake=True),
            at_most("(sum a)^2 / sum a^2 for a vector of ones", float(ones.sum() ** 2 / (ones**2).sum()), 1.0,
                    mistake=True),
        ],
        [
            "(q.k)^n is a sum over all ordered choices of n of the D products q_i k_i.",
            "The monomial with exponents k_1 ... k_D occurs n! / (k_1! ... k_D!) times; n! cancels.",
            "Each monomial of q times the same monomial of k therefore has the coefficient 1 / (k_1! ... k_D!).",
            f"Enumerated: {len(set(exponents)):,} monomials of degree up to {degree} in {width} variables; "
            f"C({width} + {degree}, {degree}) = {feature_count(width, degree):,}.",
            "For degree 2 they are 1, the D variables, their D squares and the D (D - 1) / 2 products of two "
            f"variables: {feature_count_of_degree_2(64):,} at width 64.",
            f"The features of the library agree with the series to {small(of_library)}.",
            f"The diagonal map has {diagonal_count(width, degree)} features and drops every q_i k_i q_j k_j; its error "
            f"is {of_diagonal:.1%}.",
            f"The inequality (sum a)^2 <= sum a^2 would justify this; with {width} ones, however, it reads "
            f"{width**2} <= {width}. Cauchy-Schwarz has a factor D: (sum a)^2 <= D sum a^2.",
        ],
        lambda: error_by_degree(setting),
    )  # fmt: skip


def error_by_degree(setting: Setting) -> bytes:
    """Plot the relative error of attention by degree, for several logit ranges."""
    figure, (axes,) = axes_of(1)
    for spread in (0.25, 0.5, 1.0, 1.5):
        q, k, v = normal(3, 1, 128, 8, seed=setting.seed)
        q, k = q * spread, k * spread
        exact, errors = subquad.attention(q, k, v, scale=1.0), []
        for degree in range(9):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                errors.append(distance(subquad.attention(q, k, v, scale=1.0, method=Taylor(degree)), exact))
        logits = (q @ k.mT).abs().max()
        axes.semilogy(range(9), errors, "o-", markersize=3, label=f"logits up to {logits:.1f}")
    axes.set(xlabel="degree of the series", ylabel="relative error of attention")
    axes.legend(fontsize="small")
    return svg(figure)


# --- 5: the normalizer --------------------------------------------------------------------------------------------


def normalized(weights: Tensor, values: Tensor) -> Tensor:
    """Return D^-1 A V, where D is the diagonal matrix of the row sums of A."""
    return weights @ values / weights.sum(-1, keepdim=True)


@claim(
    5, "Softmax attention is exp(Q K^T) V with each row divided by the sum of its weights; if the weights come from "
    "features, the sum must come from the same features.",
    r"\mathrm{softmax}(Q K^T) V = D^{-1} A V, \quad A = \exp(Q K^T), \; D = \mathrm{diag}(A \mathbf{1})",
    "The sum of the exact weights can be used; or rows are multiplied by D.",
)  # fmt: skip
def normalizer(setting: Setting) -> Finding:
    length, width = setting.of(16, 32, 64), 4
    q, k, v = normal(3, length, width, seed=setting.seed, spread=0.8)
    exact = (q @ k.mT).exp()
    featured = Taylor(2)(q, is_query=True) @ Taylor(2)(k, is_query=False).mT
    own = subquad.attention(q[None], k[None], v[None], scale=1.0, method=Taylor(2))[0]
    ones = torch.ones(length, 1, dtype=torch.float64)
    crossed = featured @ ones / exact.sum(-1, keepdim=True)
    times = exact * exact.sum(-1, keepdim=True) @ v
    softmax = (q @ k.mT).softmax(-1) @ v
    return Finding(
        [
            at_most("D^-1 A V, relative deviation from softmax "
                    "attention", distance(normalized(exact, v), softmax), ROUNDING),
            at_most("D^-1 A V with features, relative deviation from the "
                    "library", distance(normalized(featured, v), own),
                    ROUNDING),
            at_most("row sums with features, deviation from 1", farthest(normalized(featured, ones), 1), ROUNDING),
            at_most("the same with the exact normalizer", farthest(crossed, 1), 0.01, mistake=True),
            at_most("D A V, relative deviation from softmax attention", distance(times, softmax), 0.01, mistake=True),
        ],
        [
            "Row i of the softmax is exp(q_i.k_j) / sum_j exp(q_i.k_j): row i of A divided by entry i of A 1.",
            f"For L = {length}, D = {width}, both agree to {small(distance(normalized(exact, v), softmax))}.",
            "The weights of a series of degree 2 have other row sums. Divided by their own sums, rows sum to 1; "
            f"divided by the exact sums, rows sum to {float(crossed.min()):.3f} ... {float(crossed.max()):.3f}.",
            f"Multiplying rows by D instead of dividing gives a relative error of {distance(times, softmax):,.0f}.",
        ],
    )  # fmt: skip


# --- 6: the order of the products ---------------------------------------------------------------------------------

REASSOCIATED: list[Term] = [(1, 1, 1), (1, 1, 0)]  # L, M, D; the second is the normalizer's
AS_WRITTEN: list[Term] = [(2, 0, 1), (2, 0, 0)]


def linear_crossover(features: int, width: int) -> int:
    """Return the shortest length at which phi(Q) (phi(K)^T V), with its normalizer, needs fewer FLOPs than exact."""
    return features * (width + 1) // width + 1


@claim(
    6, "Evaluated from the right, phi(Q) (phi(K)^T V) costs O(L M D) and gives the same result; it needs fewer "
       "operations "
    "than exact attention only if L is above about M.",
    r"\phi(Q) \left(\phi(K)^T V\right) = \left(\phi(Q) \phi(K)^T\right) V, \quad O(L M D) \text{ instead of } O(L^2 "
    r"D), "
    r"\quad L > M \left(1 + \frac{1}{D}\right)",
)  # fmt: skip
def reassociated(setting: Setting) -> Finding:
    sizes, linear, quadratic, apart = [], [], [], 0.0
    for length, width, degree in product((512, 768, 1024), (3, 4, setting.of(5, 6, 8)), (2, 4)):
        q, k, v = normal(3, length, width, seed=setting.seed, spread=0.5)
        by_sums, by_pairs = (
            counted(partial(attention, q, k, v, method=Taylor(degree), order=order)) for order in ORDERS
        )
        linear.append(by_sums.flops)
        quadratic.append(by_pairs.flops)
        sizes.append((length, Taylor(degree)(q).shape[-1], width))
        apart = max(apart, distance(by_sums.result, by_pairs.result))
    of_linear, factors = misfit(REASSOCIATED, sizes, linear)
    of_quadratic, its_factors = misfit(AS_WRITTEN, sizes, quadratic)
    features = Taylor(2)(torch.ones(1, 64)).shape[-1]
    found = subquad.crossover("exact", "taylor", head_dim=64)
    assert found is not None
    turn = linear_crossover(Taylor(2)(torch.ones(1, 16)).shape[-1], 16)
    before, after = (work_of_taylor_by_exact(length, 16) for length in (turn - 1, turn))
    return Finding(
        [
            at_most("linear form, relative deviation from the quadratic form", apart, ROUNDING),
            at_most("counted FLOPs of the linear form, relative deviation from "
                    f"{written(REASSOCIATED, 'LMD', factors)}",
                    of_linear, 1e-6),
            at_most(f"counted FLOPs of the quadratic form, relative deviation from "
                    f"{written(AS_WRITTEN, 'LMD', its_factors)}", of_quadratic, 1e-6),
            equal("`crossover` of the library, width 64, degree 2", found, linear_crossover(features, 64)),
            at_least(f"counted FLOPs / FLOPs of exact attention, width 16, L = {turn - 1}", before, 1.0),
            at_most(f"the same, L = {turn}", after, 0.9999),
        ],
        [
            "The product of three matrices does not depend on the order of evaluation; its cost does.",
            "From the left, the weights are L x L. A weight is a series in q.k, so the library computes it without "
            f"features. Counted: {written(AS_WRITTEN, 'LMD', its_factors)} operations.",
            "From the right, phi(K)^T V is M x D, independent of L. It needs 2 L M D operations, the product with "
            "phi(Q) as many again, and the normalizer is one more column. Counted: "
            f"{written(REASSOCIATED, 'LMD', factors)}.",
            f"Both forms agree to {small(apart)} over {len(set(sizes))} shapes.",
            "Exact attention needs 4 L^2 D operations; 4 L M (D + 1) is less if L > M (1 + 1/D).",
            f"At D = 64 and degree 2, M = {features:,}, so the linear form needs fewer operations from L = "
            f"{linear_crossover(features, 64):,} on. `crossover` returns {found:,}.",
        ],
        lambda: cost_curves(found),
    )  # fmt: skip


def work_of_taylor_by_exact(length: int, width: int) -> float:
    q, k, v = normal(3, length, width, seed=0)
    of_series, of_exact = (counted(partial(attention, q, k, v, method=method)).flops for method in (Taylor(2), Exact()))
    return of_series / of_exact


def cost_curves(found: int) -> bytes:
    figure, (axes,) = axes_of(1)
    lengths = [2**i for i in range(6, 17)]
    forms: dict[str, Callable[[int], float]] = {
        "exact": lambda n: subquad.cost("exact", query_length=n, head_dim=64).flops,
        "Taylor, degree 2": lambda n: subquad.cost("taylor", query_length=n, head_dim=64, form="linear").flops,
        "256 random features": lambda n: subquad.cost("random", query_length=n, head_dim=64, form="linear").flops,
        "separable": lambda n: subquad.cost("separable", query_length=n, head_dim=64, form="linear").flops,
    }
    for name, work in forms.items():
        axes.loglog(lengths, [work(n) for n in lengths], "o-", markersize=3, label=name)
    axes.axvline(found, color="gray", linestyle=":", label=f"crossover with Taylor, L = {found:,}")
    axes.set(xlabel="tokens", ylabel="FLOPs of a head of width 64")
    axes.legend(fontsize="small")
    return svg(figure)


# --- 8: random features -------------------------------------------------------------------------------------------

DRAWS = 40_000  # of x, divided among the estimates
DIRECTIONS = 16  # of the pairs q and k, so that each draw is used several times


def pairs(norm_of_sum: float, cosine: float, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return q and k (directions, width) of equal norm, with this cosine and this norm of their sum."""
    first, second = normal(2, DIRECTIONS, width, seed=seed)
    q = first / first.norm(dim=-1, keepdim=True)
    across = second - (second * q).sum(-1, keepdim=True) * q
    k = cosine * q + math.sqrt(1 - cosine**2) * across / across.norm(dim=-1, keepdim=True)
    size = norm_of_sum / (q + k).norm(dim=-1, keepdim=True)
    return q * size, k * size


def kernel(q: Tensor, k: Tensor) -> float:
    """Return exp(q.k), which is the same for all pairs."""
    return float((q[0] @ k[0]).exp())


def estimate_variance(q: Tensor, k: Tensor, count: int) -> float:
    """Return the variance of the estimate of exp(q.k) by `count` independent positive features."""
    return float((2 * q[0] @ k[0]).exp() * torch.expm1((q[0] + k[0]).square().sum()) / count)


def drawn(rows: int, width: int, seed: int, coupling: Any, of_all: int = DRAWS) -> Tensor:
    """Draw matrices (draws, rows, width) with the library, whose coupled rows come in blocks of `width`."""
    block = rows if coupling == "independent" else -(-rows // width) * width
    matrix = RandomFeatures(of_all // block * block, coupling=coupling).redraw(seed).draw(width)
    return matrix.reshape(-1, block, width)[:, :rows]


def estimates(q: Tensor, k: Tensor, matrices: Tensor, kind: Any, scale: float = 0.0) -> Tensor:
    """Return phi(q).phi(k) with the library's features, (draws, directions)."""
    rows = matrices.shape[1]
    method = RandomFeatures(rows if kind == "positive" else 2 * rows, kind=kind, scale=scale)
    (a, s), (b, t) = (method.features(x, matrices) for x in (q, k))
    return (a * b).sum(-1) * (s + t).exp()


def bias(found: Tensor, wanted: float) -> float:
    """Return the largest bias over the directions, in standard errors."""
    return float(((found.mean(0) - wanted).abs() / (found.std(0) / math.sqrt(len(found)))).max())


def gain(q: Tensor, k: Tensor, kind: str, seed: int) -> float:
    """Return the mean squared error of `width` independent draws, divided by that of orthogonal draws."""
    width = q.shape[-1]
    independent, orthogonal = (
        estimates(q, k, drawn(width, width, seed, coupling), kind) for coupling in ("independent", "orthogonal")
    )
    return float((independent - kernel(q, k)).square().mean() / (orthogonal - kernel(q, k)).square().mean())


def orthogonal_gain(apart: float) -> float:
    """Return the variance of 4 trigonometric features with independent draws, divided by that with orthogonal draws.

    The width is 4 and |q - k| is `apart`. The mean of cos(x.z) cos(y.z) is exp(-2 s) for independent x and y, with s =
    |z|^2/2, and exp(-s) (1 - s + s^2/6) for orthogonal x and y.
    """
    s = apart**2 / 2
    of_one = (1 + math.exp(-4 * s)) / 2 - math.exp(-2 * s)
    of_two = math.exp(-s) * (1 - s + s**2 / 6) - math.exp(-2 * s)
    return of_one / (of_one + 3 * of_two)


@claim(
    8, "exp(q.k) is the mean of exp(x.q - |q|^2/2) exp(x.k - |k|^2/2) over normal x: the estimate from m draws is "
    "unbiased, with a variance that falls as 1/m and grows as exp(|q+k|^2). Orthogonal draws reduce the variance for "
    "small norms, but not always.",
    r"e^{q \cdot k} = e^{-|q|^2/2} \, \mathbb{E}\left[e^{x \cdot q} e^{x \cdot k}\right] e^{-|k|^2/2}, \quad "
    r"\mathrm{Var} = \frac{e^{2 q \cdot k} \left(e^{|q+k|^2} - 1\right)}{m}",
)  # fmt: skip
def random_features(setting: Setting) -> Finding:
    width, seed = setting.of(6, 8, 12), setting.seed
    checks, lines = [], []
    for norm, cosine in ((0.3, 0.5), (0.6, -0.9), (1.0, 0.5)):  # the second two nearly opposed, so that q.k is below 0
        q, k = pairs(norm, cosine, width, seed)
        found = estimates(q, k, drawn(4, width, seed, "independent"), "positive")
        ratio = float(found.var(0).mean()) / estimate_variance(q, k, 4)
        checks.append(at_most(f"bias at |q+k| = {norm}, in standard errors", bias(found, kernel(q, k)), 6.0))
        checks.append(equal(f"variance at |q+k| = {norm} / formula", ratio, 1, within=0.15))
        lines.append(f"|q+k| = {norm}, q.k = {float(q[0] @ k[0]):.2f}: mean {float(found.mean()):.4f} of "
                     f"{kernel(q, k):.4f}, variance {ratio:.3f} times the formula.")  # fmt: skip
    q, k = pairs(0.5, 0.5, width, seed)
    few, many = (float(estimates(q, k, drawn(m, width, seed, "independent"), "positive").var(0).mean())
                 for m in (2, 32))  # fmt: skip
    turned = estimates(q, k, drawn(width, width, seed, "orthogonal"), "positive")
    helped = gain(q, k, "positive", seed)
    unit = normal(4 * DIRECTIONS, 4, seed=seed)
    unit = unit / unit.norm(dim=-1, keepdim=True)
    gains = {apart: gain(apart / 2 * unit, -apart / 2 * unit, "trigonometric", seed) for apart in (1.0, 3.5)}
    return Finding(
        [
            *checks,
            equal("variance of 2 features / variance of 32", few / many, 32 / 2, within=0.15),
            at_most("bias of orthogonal draws at |q+k| = 0.5, in standard errors", bias(turned, kernel(q, k)), 6.0),
            at_least("squared error of independent draws / of orthogonal draws", helped, 1.02),
            *(equal(f"the same for trigonometric features at width 4, |q-k| = {apart}", found,
                    orthogonal_gain(apart), within=0.03) for apart, found in gains.items()),
            at_most("the last ratio: orthogonal draws are worse there", gains[3.5], 0.999),
        ],
        [
            "E[exp(x.y)] = exp(|y|^2/2) for x ~ N(0, I). With y = q + k, |q+k|^2 = |q|^2 + |k|^2 + 2 q.k, so "
            "E[exp(x.q) exp(x.k)] exp(-|q|^2/2 - |k|^2/2) = exp(q.k).",
            "The square of one estimate has the mean exp(2|q+k|^2 - |q|^2 - |k|^2) = exp(2 q.k + |q+k|^2). "
            "Subtracting the "
            "squared mean, exp(2 q.k), and dividing by m gives the variance.",
            *lines,
            f"2 features have {few / many:.1f} times the variance of 32.",
            f"Orthogonal draws are unbiased too. At |q+k| = 0.5, independent draws have {helped:.2f} times their "
            "squared error.",
            "Trigonometric features are cosines of x.z, z = q - k. At width 4, the product of two of them has the mean "
            "exp(-s) (1 - s + s^2/6) for orthogonal draws and exp(-2 s) for independent draws, s = |z|^2/2: smaller if "
            "z is short, and larger if |z| is about 3.5. Compared to independent draws, orthogonal draws have "
            f"{1 / gains[1.0]:.2f} times the squared error at |q-k| = 1, and {1 / gains[3.5]:.3f} times at 3.5.",
        ],
        lambda: error_by_features(setting),
    )  # fmt: skip


def error_by_features(setting: Setting) -> bytes:
    """Plot the relative RMS error of the kernel at |q+k| = 1, width 16, by number of features."""
    figure, (axes,) = axes_of(1)
    q, k = pairs(1.0, 0.5, 16, setting.seed)
    counts = [8, 16, 32, 64, 128, 256]
    for name, kind, coupling in (("independent", "positive", "independent"), ("orthogonal", "positive", "orthogonal"),
                                 ("orthogonal, hyperbolic", "hyperbolic", "orthogonal")):  # fmt: skip
        errors = []
        for m in counts:
            matrices = drawn(m if kind == "positive" else m // 2, 16, setting.seed, coupling, of_all=1 << 16)
            errors.append(float((estimates(q, k, matrices, kind) / kernel(q, k) - 1).square().mean().sqrt()))
        axes.loglog(counts, errors, "o-", markersize=3, label=name)
    axes.set(xlabel="features m", ylabel="relative error of exp(q.k)")
    axes.set_xticks(counts, [str(m) for m in counts])
    axes.set_yticks(shares := [0.03, 0.05, 0.1, 0.2, 0.5], [f"{share:.0%}" for share in shares])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    return svg(figure)
