"""Features whose product is the exponential, or nearly.

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
    """The exponents of all monomials of up to this degree, one by one."""
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
    """What a monomial of q times the same of k counts for."""
    return 1 / math.prod(math.factorial(k) for k in exponents)


def series(x: Tensor, degree: int) -> Tensor:
    return sum((x**power / math.factorial(power) for power in range(degree + 1)), torch.zeros_like(x))


@claim(
    4, "The truncated Maclaurin series of exp(q.k) is a product of features: all monomials, cross terms among them, "
    "with weights 1 / sqrt(product of factorials of the exponents).",
    r"\phi(q) \cdot \phi(k) = \sum_{n \le K} \frac{(q \cdot k)^n}{n!}, \quad M = \binom{D + K}{K}, \quad "
    r"M = 1 + D + \frac{D (D + 1)}{2} \text{ for } K = 2",
    "M = K D + 1 features do, the powers of each variable alone; or (sum a)^2 <= sum a^2 by Cauchy-Schwarz.",
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
            equal("features that the library makes", of_q.shape[-1], feature_count(width, degree)),
            equal("the same of degree 2, width 64", Taylor(2)(torch.ones(1, 64)).shape[-1],
                  feature_count_of_degree_2(64)),
            at_most("library's features from the series", of_library, ROUNDING),
            at_most("enumerated monomials with their weights from the series", distance(by_hand, wanted), ROUNDING),
            at_most("(sum a)^2 by D sum a^2, over 1,000 vectors", float(shares.max()) / width, 1.0),
            equal("the monomials, by the count of the diagonal map", len(set(exponents)),
                  diagonal_count(width, degree), mistake=True),
            at_most("diagonal map from the series", of_diagonal, ROUNDING, mistake=True),
            at_most("(sum a)^2 by sum a^2, of ones", float(ones.sum() ** 2 / (ones**2).sum()), 1.0, mistake=True),
        ],
        [
            "(q.k)^n is a sum over all ways to choose n of the D products q_i k_i, in order.",
            "The monomial with exponents k_1 ... k_D is chosen n! / (k_1! ... k_D!) times; n! cancels.",
            "So each monomial of q, times the same of k, counts 1 / (k_1! ... k_D!).",
            f"Enumerated: {len(set(exponents)):,} monomials of degree up to {degree} in {width} variables; "
            f"C({width} + {degree}, {degree}) = {feature_count(width, degree):,}.",
            "Of degree 2 they are 1, the D variables, their D squares and the D (D - 1) / 2 products of two: at width "
            f"64, {feature_count_of_degree_2(64):,}.",
            f"Features of the library meet the series to {small(of_library)}.",
            f"The diagonal map has {diagonal_count(width, degree)} features and drops every q_i k_i q_j k_j: off by "
            f"{of_diagonal:.1%}.",
            f"That dropping them is harmless is argued by (sum a)^2 <= sum a^2; for {width} ones it is {width**2} "
            f"against {width}. Cauchy-Schwarz has a factor D: (sum a)^2 <= D sum a^2.",
        ],
        lambda: error_by_degree(setting),
    )  # fmt: skip


def error_by_degree(setting: Setting) -> bytes:
    """Of the output of attention, against exact attention, for logits of several sizes."""
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
    """D^-1 A V, D the diagonal of the row sums."""
    return weights @ values / weights.sum(-1, keepdim=True)


@claim(
    5, "Softmax attention is exp(Q K^T) V with each row divided by the sum of its weights; where features make the "
    "weights, the sum must be made of the same features.",
    r"\mathrm{softmax}(Q K^T) V = D^{-1} A V, \quad A = \exp(Q K^T), \; D = \mathrm{diag}(A \mathbf{1})",
    "The sum of the exact weights will do; or rows are multiplied by D.",
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
            at_most("D^-1 A V from softmax", distance(normalized(exact, v), softmax), ROUNDING),
            at_most("D^-1 A V of features from the library", distance(normalized(featured, v), own), ROUNDING),
            at_most("sums of the weights of features from 1", farthest(normalized(featured, ones), 1), ROUNDING),
            at_most("the same with the exact normalizer", farthest(crossed, 1), 0.01, mistake=True),
            at_most("D A V from softmax", distance(times, softmax), 0.01, mistake=True),
        ],
        [
            "Row i of softmax is exp(q_i.k_j) / sum_j exp(q_i.k_j): row i of A by the i-th entry of A 1.",
            f"Checked with L = {length}, D = {width}: to {small(distance(normalized(exact, v), softmax))}.",
            "Weights of a series of degree 2 have other sums. Divided by their own, each row sums to 1; divided by the "
            f"exact sums, rows sum to {float(crossed.min()):.3f} ... {float(crossed.max()):.3f}.",
            f"Rows multiplied by D instead of divided are {distance(times, softmax):,.0f} times too large.",
        ],
    )  # fmt: skip


# --- 6: the order of the products ---------------------------------------------------------------------------------

REASSOCIATED: list[Term] = [(1, 1, 1), (1, 1, 0)]  # L, M, D; the second is the normalizer's
AS_WRITTEN: list[Term] = [(2, 0, 1), (2, 0, 0)]


def linear_crossover(features: int, width: int) -> int:
    """The shortest length at which phi(Q) (phi(K)^T V), with its normalizer, takes less work than exact attention."""
    return features * (width + 1) // width + 1


@claim(
    6, "Multiplied from the right, phi(Q) (phi(K)^T V) costs O(L M D) and gives the same numbers; it takes less work "
    "than exact attention only for L above about M.",
    r"\phi(Q) \left(\phi(K)^T V\right) = \left(\phi(Q) \phi(K)^T\right) V, \quad O(L M D) \text{ against } O(L^2 D), "
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
            at_most("library's linear form from its quadratic one", apart, ROUNDING),
            at_most(f"counted work of the linear form from {written(REASSOCIATED, 'LMD', factors)}", of_linear, 1e-6),
            at_most(f"of the quadratic one from {written(AS_WRITTEN, 'LMD', its_factors)}", of_quadratic, 1e-6),
            equal("library's crossover, width 64, degree 2", found, linear_crossover(features, 64)),
            at_least(f"width 16, L = {turn - 1}: counted work by that of exact attention", before, 1.0),
            at_most(f"width 16, L = {turn}: the same", after, 0.9999),
        ],
        [
            "A product of three matrices does not depend on where it begins; its cost does.",
            "From the left, weights are L x L. A weight is a series in q.k, so the library needs no features for it: "
            f"counted, {written(AS_WRITTEN, 'LMD', its_factors)}.",
            "From the right, phi(K)^T V is M x D, whatever L is: 2 L M D, as much again for the queries, and the "
            f"normalizer is one more column. Counted: {written(REASSOCIATED, 'LMD', factors)}.",
            f"Both forms agree to {small(apart)}, over {len(set(sizes))} shapes.",
            "Exact attention takes 4 L^2 D. 4 L M (D + 1) is less once L > M (1 + 1/D).",
            f"At D = 64 and degree 2, M = {features:,}: from L = {linear_crossover(features, 64):,}. The library says "
            f"{found:,}.",
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
    axes.axvline(found, color="gray", linestyle=":", label=f"crossover of Taylor, L = {found:,}")
    axes.set(xlabel="tokens", ylabel="operations of a head of width 64")
    axes.legend(fontsize="small")
    return svg(figure)


# --- 8: random features -------------------------------------------------------------------------------------------

ROWS = 40_000  # draws of x, shared out to estimates
DIRECTIONS = 16  # in which pairs of q and k are turned, so that one draw is seen from many sides


def pairs(norm_of_sum: float, cosine: float, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """q and k (directions, width) of equal length, with this cosine between them, whose sum has this norm."""
    first, second = normal(2, DIRECTIONS, width, seed=seed)
    q = first / first.norm(dim=-1, keepdim=True)
    across = second - (second * q).sum(-1, keepdim=True) * q
    k = cosine * q + math.sqrt(1 - cosine**2) * across / across.norm(dim=-1, keepdim=True)
    size = norm_of_sum / (q + k).norm(dim=-1, keepdim=True)
    return q * size, k * size


def kernel(q: Tensor, k: Tensor) -> float:
    """What the features estimate without bias, for pairs that differ in their direction alone."""
    return float((q[0] @ k[0]).exp())


def estimate_variance(q: Tensor, k: Tensor, count: int) -> float:
    """Of the estimate of exp(q.k) by independent positive features."""
    return float((2 * q[0] @ k[0]).exp() * torch.expm1((q[0] + k[0]).square().sum()) / count)


def drawn(rows: int, width: int, seed: int, orthogonal: bool, of_all: int = ROWS) -> Tensor:
    """Matrices (draws, rows, width) by the library, whose orthogonal rows come in blocks of the width."""
    block = -(-rows // width) * width if orthogonal else rows
    matrix = RandomFeatures(of_all // block * block, orthogonal=orthogonal).redraw(seed).draw(width)
    return matrix.reshape(-1, block, width)[:, :rows]


def estimates(q: Tensor, k: Tensor, matrices: Tensor, kind: Any) -> Tensor:
    """phi(q).phi(k) by the library's features: (draws, directions)."""
    rows = matrices.shape[1]
    method = RandomFeatures(rows if kind == "positive" else 2 * rows, kind=kind)
    (a, s), (b, t) = (method.features(x, matrices) for x in (q, k))
    return (a * b).sum(-1) * (s + t).exp()


def bias(found: Tensor, wanted: float) -> float:
    """The largest over the directions, in standard errors."""
    return float(((found.mean(0) - wanted).abs() / (found.std(0) / math.sqrt(len(found)))).max())


def gain(q: Tensor, k: Tensor, kind: str, seed: int) -> float:
    """The mean squared error with independent draws by that with orthogonal ones, as many as the width."""
    width = q.shape[-1]
    independent, orthogonal = (estimates(q, k, drawn(width, width, seed, turned), kind) for turned in (False, True))
    return float((independent - kernel(q, k)).square().mean() / (orthogonal - kernel(q, k)).square().mean())


def orthogonal_gain(apart: float) -> float:
    """Of 4 trigonometric features at width 4, |q - k| apart: their variance from independent draws by that from
    orthogonal ones.

    The mean of cos(x.z) cos(y.z) is exp(-2 s) for independent x and y, s = |z|^2/2, and exp(-s) (1 - s + s^2/6) for
    orthogonal ones.
    """
    s = apart**2 / 2
    of_one = (1 + math.exp(-4 * s)) / 2 - math.exp(-2 * s)
    of_two = math.exp(-s) * (1 - s + s**2 / 6) - math.exp(-2 * s)
    return of_one / (of_one + 3 * of_two)


@claim(
    8, "exp(q.k) is the mean of exp(x.q - |q|^2/2) exp(x.k - |k|^2/2) over normal x: m draws estimate it without "
    "bias, with a variance that falls as 1/m and grows as exp(|q+k|^2). Orthogonal draws help where norms are small, "
    "not always.",
    r"e^{q \cdot k} = e^{-|q|^2/2} \, \mathbb{E}\left[e^{x \cdot q} e^{x \cdot k}\right] e^{-|k|^2/2}, \quad "
    r"\mathrm{Var} = \frac{e^{2 q \cdot k} \left(e^{|q+k|^2} - 1\right)}{m}",
)  # fmt: skip
def random_features(setting: Setting) -> Finding:
    width, seed = setting.of(6, 8, 12), setting.seed
    checks, lines = [], []
    for norm, cosine in ((0.3, 0.5), (0.6, -0.9), (1.0, 0.5)):  # the second two nearly opposed, so that q.k is below 0
        q, k = pairs(norm, cosine, width, seed)
        found = estimates(q, k, drawn(4, width, seed, orthogonal=False), "positive")
        ratio = float(found.var(0).mean()) / estimate_variance(q, k, 4)
        checks.append(at_most(f"bias at |q+k| = {norm}, in standard errors", bias(found, kernel(q, k)), 6.0))
        checks.append(equal(f"variance at |q+k| = {norm} by the formula", ratio, 1, within=0.15))
        lines.append(f"|q+k| = {norm}, q.k = {float(q[0] @ k[0]):.2f}: mean {float(found.mean()):.4f} of "
                     f"{kernel(q, k):.4f}, variance {ratio:.3f} times the formula.")  # fmt: skip
    q, k = pairs(0.5, 0.5, width, seed)
    few, many = (float(estimates(q, k, drawn(m, width, seed, orthogonal=False), "positive").var(0).mean())
                 for m in (2, 32))  # fmt: skip
    turned = estimates(q, k, drawn(width, width, seed, orthogonal=True), "positive")
    helped = gain(q, k, "positive", seed)
    unit = normal(4 * DIRECTIONS, 4, seed=seed)
    unit = unit / unit.norm(dim=-1, keepdim=True)
    gains = {apart: gain(apart / 2 * unit, -apart / 2 * unit, "trigonometric", seed) for apart in (1.0, 3.5)}
    return Finding(
        [
            *checks,
            equal("variance of 2 features by that of 32", few / many, 32 / 2, within=0.15),
            at_most("bias of orthogonal draws at |q+k| = 0.5, in standard errors", bias(turned, kernel(q, k)), 6.0),
            at_least("their gain: squared error of independent draws by theirs", helped, 1.02),
            *(equal(f"gain of trigonometric features at width 4, |q-k| = {apart}", found,
                    orthogonal_gain(apart), within=0.03) for apart, found in gains.items()),
            at_most("the last, which is a loss", gains[3.5], 0.999),
        ],
        [
            "E[exp(x.y)] = exp(|y|^2/2) for x ~ N(0, I). With y = q + k, |q+k|^2 = |q|^2 + |k|^2 + 2 q.k, so that "
            "E[exp(x.q) exp(x.k)] exp(-|q|^2/2 - |k|^2/2) = exp(q.k).",
            "The square of one estimate has the mean exp(2|q+k|^2 - |q|^2 - |k|^2) = exp(2 q.k + |q+k|^2); less the "
            "squared mean, exp(2 q.k), and divided by m, that is the variance.",
            *lines,
            f"2 features have {few / many:.1f} times the variance of 32.",
            f"Orthogonal draws are without bias too, and at |q+k| = 0.5 have {helped:.2f} times less squared error.",
            "Trigonometric features are cosines of x.z, z = q - k. At width 4 the product of two of them is exp(-s) "
            "(1 - s + s^2/6) on average for orthogonal draws and exp(-2 s) for independent ones, s = |z|^2/2: less "
            f"where z is short, and more around 3.5. Where |q-k| = 1 the squared error is {gains[1.0]:.2f} times less, "
            f"where it is 3.5 it is {gains[3.5]:.3f} times less, which is more.",
        ],
        lambda: error_by_features(setting),
    )  # fmt: skip


def error_by_features(setting: Setting) -> bytes:
    """Root mean square, relative, of the kernel at |q+k| = 1, width 16."""
    figure, (axes,) = axes_of(1)
    q, k = pairs(1.0, 0.5, 16, setting.seed)
    counts = [8, 16, 32, 64, 128, 256]
    for name, kind, orthogonal in (("independent", "positive", False), ("orthogonal", "positive", True),
                                   ("orthogonal, hyperbolic", "hyperbolic", True)):  # fmt: skip
        errors = []
        for m in counts:
            matrices = drawn(m if kind == "positive" else m // 2, 16, setting.seed, orthogonal, of_all=1 << 16)
            errors.append(float((estimates(q, k, matrices, kind) / kernel(q, k) - 1).square().mean().sqrt()))
        axes.loglog(counts, errors, "o-", markersize=3, label=name)
    axes.set(xlabel="features m", ylabel="relative error of exp(q.k)")
    axes.set_xticks(counts, [str(m) for m in counts])
    axes.set_yticks(shares := [0.03, 0.05, 0.1, 0.2, 0.5], [f"{share:.0%}" for share in shares])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    return svg(figure)
