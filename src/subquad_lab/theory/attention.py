"""What attention costs, and what becomes of it when the exponential is replaced.

L tokens, D width of a head, d width of the model, h heads, K degree, M features.
"""

import math
import warnings
from collections.abc import Callable
from itertools import combinations_with_replacement, product

import torch
from torch import Tensor

import subquad
from subquad import Exact, Linear, RandomFeatures, Separable, Taylor
from subquad_lab.models import parameters
from subquad_lab.plots import axes_of, svg
from subquad_lab.theory import Finding, Setting, at_least, at_most, claim, equal, figure, small
from subquad_lab.theory.counting import Term, exponentials, flops, misfit, peak_bytes, written

ROUNDING = 1e-12  # of float64, with some room


def normal(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * spread


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As it is written in the books."""
    scores = q @ k.mT
    weights = scores.softmax(-1)
    return weights @ v


def distance(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|."""
    return float((found - wanted).norm() / wanted.norm())


def weights_of(q: Tensor, k: Tensor, method: object) -> Tensor:
    """The matrix (L, L) by which a method weighs values: what it makes of the unit vectors."""
    identity = torch.eye(k.shape[-2], dtype=k.dtype)
    return subquad.attention(q[None], k[None], identity[None], scale=1.0, method=method)[0]


# --- 1 to 3: what it costs ----------------------------------------------------------------------------------------

HEAD_TIME: list[Term] = [(2, 1)]  # L, D
HEAD_MEMORY: list[Term] = [(2, 0), (1, 1)]


@claim(
    1, "One head takes time in proportion to L^2 D, and memory in proportion to L^2 and L D.",
    r"\text{time} = \Theta(L^2 D), \quad \text{memory} = \Theta(L^2 + L D)",
)  # fmt: skip
def one_head_costs(setting: Setting) -> Finding:
    base = setting.of(32, 48, 64)
    sizes = [(base * a, base // 4 * b) for a, b in product((1, 2, 4, 8), (1, 4, 16))]
    times, bytes_held = [], []
    for length, width in sizes:
        q, k, v = normal(3, length, width, seed=setting.seed)
        times.append(flops(lambda q=q, k=k, v=v: one_head(q, k, v)))
        bytes_held.append(peak_bytes(lambda q=q, k=k, v=v: one_head(q, k, v)))
    of_time, (factor,) = misfit(HEAD_TIME, sizes, times)
    of_memory, parts = misfit(HEAD_MEMORY, sizes, [b / 8 for b in bytes_held])
    return Finding(
        [
            at_most(f"counted work from {figure(factor)} {written(HEAD_TIME, 'LD')}", of_time, 1e-6),
            at_most(f"measured peak memory from a sum of {written(HEAD_MEMORY, 'LD')}", of_memory, 0.02),
            at_least("numbers held for each pair of tokens", parts[0], 1.0),
        ],
        [
            "The scores Q K^T are L x L products of vectors of D numbers: 2 L^2 D operations.",
            "The result is L rows, each a sum of L values of D numbers: again 2 L^2 D.",
            f"Counted over {len(sizes)} sizes, L = {sizes[0][0]} to {sizes[-1][0]} and D = {sizes[0][1]} to "
            f"{sizes[-1][1]}: {figure(factor)} L^2 D operations, and no size is off by more than {small(of_time)}.",
            "Scores and weights are L^2 numbers each and live at the same time; the result is L D more.",
            f"Measured: {parts[0]:.3f} L^2 + {parts[-1]:.3f} L D numbers of 8 bytes, to {small(of_memory)}.",
        ],
    )  # fmt: skip


IN_TURN_TIME: list[Term] = [(2, 1, 1), (1, 2, 1)]  # L, d, h
IN_TURN_MEMORY: list[Term] = [(2, 0, 0), (1, 1, 1), (0, 2, 1)]
LOWER: list[Term] = [(1, 1, 0)]  # what one head holds besides
IN_TURN_MISTAKE: list[Term] = [(2, 0, 1), (1, 1, 1), (0, 2, 1)]


def heads_in_turn(x: Tensor, heads: int, seed: int) -> list[Tensor]:
    """Each head with matrices of its own, (d, d); the memory of one is free before the next begins."""
    width = x.shape[-1]
    matrices = [[normal(width, width, seed=seed + 3 * i + j, spread=width**-0.5) for j in range(3)]
                for i in range(heads)]  # fmt: skip
    return [one_head(*(x @ matrix for matrix in own)) for own in matrices]


@claim(
    2, "h heads of full width d, one after another: the scores of one head are gone before the next begins.",
    r"\text{time} = \Theta(h (L^2 d + L d^2)), \quad \text{memory} = \Theta(L^2 + h L d + h d^2)",
    "The memory is h times L^2.",
)  # fmt: skip
def heads_in_turn_cost(setting: Setting) -> Finding:
    base = setting.of(32, 48, 64)
    sizes = list(product((base, 2 * base, 4 * base), (8, 16, 32), (1, 2, 4, 8)))
    times, held = [], []
    for length, width, heads in sizes:
        x = normal(length, width, seed=setting.seed)
        times.append(flops(lambda x=x, heads=heads: heads_in_turn(x, heads, setting.seed)))
        held.append(peak_bytes(lambda x=x, heads=heads: heads_in_turn(x, heads, setting.seed)) / 8)
    of_time, factors = misfit(IN_TURN_TIME, sizes, times)
    of_memory, parts = misfit(IN_TURN_MEMORY + LOWER, sizes, held)
    of_mistake, _ = misfit(IN_TURN_MISTAKE + LOWER, sizes, held)
    longest = [held[i] for i, size in enumerate(sizes) if size[:2] == (4 * base, 8)]
    return Finding(
        [
            at_most(f"counted work from {written(IN_TURN_TIME, 'Ldh')}", of_time, 1e-6),
            at_most(f"measured peak memory from {written(IN_TURN_MEMORY, 'Ldh')}", of_memory, 0.05),
            at_most(f"the same from {written(IN_TURN_MISTAKE, 'Ldh')}", of_mistake, 0.05, mistake=True),
        ],
        [
            "A head makes queries, keys and values, 3 products of 2 L d^2, and attends in 4 L^2 d.",
            f"Counted for h = 1 to 8: {figure(factors[0])} h L^2 d + {figure(factors[1])} h L d^2.",
            "Its scores and weights, L^2 each, are needed until its result is made, and then never again.",
            "What stays of each head is its result, L d, and its three matrices, d^2 each.",
            f"Measured: {parts[0]:.2f} L^2 + {parts[1]:.2f} h L d + {parts[2]:.2f} h d^2 numbers, to "
            f"{small(of_memory)}.",
            f"From 1 head to 8 at L = {4 * base}, d = 8 the memory grows {longest[3] / longest[0]:.2f} times, not 8 "
            f"times; a fit by h L^2 is off by up to {of_mistake:.0%}.",
        ],
    )  # fmt: skip


def head_parameters(width: int, heads: int) -> int:
    """Of queries, keys and values, for any number of heads of width d / h."""
    return 3 * width**2


def softmax_work(length: int, heads: int) -> int:
    """Exponentials."""
    return heads * length**2


@claim(
    3, "Heads of width d/h together have the parameters of one head of width d, and the same work but for the softmax, "
    "of which there is h times as much.",
    r"3 d^2 \;(+\, d^2 \text{ for the output}), \quad 4 L^2 d \text{ operations}, \quad h L^2 \text{ exponentials}",
)  # fmt: skip
def multi_head_costs(setting: Setting) -> Finding:
    width, length = setting.of(16, 32, 64), setting.of(24, 40, 64)
    counts, works, powers = {}, {}, {}
    for heads in (1, 2, 4, 8):
        layer = subquad.MultiheadAttention(width, heads, bias=False, batch_first=True)
        counts[heads] = parameters(layer)["total"]
        q, k, v = normal(3, heads, length, width // heads, seed=setting.seed)
        works[heads] = flops(lambda q=q, k=k, v=v: one_head(q, k, v))
        powers[heads] = exponentials(lambda q=q, k=k, v=v: one_head(q, k, v))
    output = width**2
    return Finding(
        [
            *(equal(f"parameters of {h} heads but for the output", counts[h] - output, head_parameters(width, h))
              for h in counts),
            equal("work of 8 heads by that of one", works[8] / works[1], 1),
            equal("exponentials of 8 heads", powers[8], softmax_work(length, 8)),
            equal("exponentials of one head", powers[1], softmax_work(length, 1)),
        ],
        [
            f"A head of width d/h has three matrices of d x d/h; h of them are 3 d^2, here 3 x {width}^2 = "
            f"{counts[1] - output:,}, and the output matrix is {output:,} more.",
            f"Counted in the library's own layer: {', '.join(f'{c:,} with {h} heads' for h, c in counts.items())}.",
            "Scores of a head take 2 L^2 d/h, so those of all heads 2 L^2 d: h cancels.",
            f"Counted at L = {length}: {works[1]:,} operations with one head, {works[8]:,} with eight.",
            f"Each head has L^2 weights of its own: {powers[1]:,} exponentials with one, {powers[8]:,} with eight.",
        ],
    )  # fmt: skip


# --- 4 to 6: features ---------------------------------------------------------------------------------------------


def monomials(width: int, degree: int) -> list[tuple[int, ...]]:
    """The exponents of all monomials of up to this degree, one by one."""
    found = []
    for power in range(degree + 1):
        for variables in combinations_with_replacement(range(width), power):
            found.append(tuple(variables.count(i) for i in range(width)))
    return found


def feature_count(width: int, degree: int) -> int:
    return math.comb(width + degree, degree)


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
    r"\phi(q) \cdot \phi(k) = \sum_{n \le K} \frac{(q \cdot k)^n}{n!}, \quad M = \binom{D + K}{K}",
    "M = K D + 1 features do, the powers of each variable alone; or (sum a)^2 <= sum a^2 by Cauchy-Schwarz.",
)  # fmt: skip
def maclaurin(setting: Setting) -> Finding:
    width, degree = setting.of(3, 5, 8), 4
    q, k = normal(2, 6, width, seed=setting.seed, spread=0.7)
    wanted = series(q @ k.mT, degree)
    method = Taylor(degree)
    of_library = distance(method(q, is_query=True) @ method(k, is_query=False).mT, wanted)
    exponents = monomials(width, degree)
    powers = torch.tensor(exponents, dtype=torch.float64)
    weights = torch.tensor([monomial_weight(each) for each in exponents], dtype=torch.float64)
    by_hand = (q[:, None] ** powers).prod(-1) * weights @ (k[:, None] ** powers).prod(-1).mT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diagonal = Taylor(degree, basis="diagonal")
    of_diagonal = distance(diagonal(q, is_query=True) @ diagonal(k, is_query=False).mT, wanted)
    ones, drawn = torch.ones(width), normal(1000, width, seed=setting.seed)
    shares = drawn.sum(-1) ** 2 / (drawn**2).sum(-1)
    return Finding(
        [
            equal(f"monomials of degree {degree} at width {width}, enumerated", len(set(exponents)),
                  feature_count(width, degree)),
            equal("features of the library", method.size(width), feature_count(width, degree)),
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
    figure_, (axes,) = axes_of(1)
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
    return svg(figure_)


def normalised(weights: Tensor, values: Tensor) -> Tensor:
    """D^-1 A V, D the diagonal of the row sums."""
    return weights @ values / weights.sum(-1, keepdim=True)


@claim(
    5, "Softmax attention is exp(Q K^T) V with each row divided by the sum of its weights; where features make the "
    "weights, the sum must be made of the same features.",
    r"\mathrm{softmax}(Q K^T) V = D^{-1} A V, \quad A = \exp(Q K^T), \; D = \mathrm{diag}(A \mathbf{1})",
    "The sum of the exact weights will do; or rows are multiplied by D.",
)  # fmt: skip
def normaliser(setting: Setting) -> Finding:
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
            at_most("D^-1 A V from softmax", distance(normalised(exact, v), softmax), ROUNDING),
            at_most("D^-1 A V of features from the library", distance(normalised(featured, v), own), ROUNDING),
            at_most("sums of the weights of features from 1",
                    float((normalised(featured, ones) - 1).abs().max()), ROUNDING),
            at_most("the same with the exact normaliser", float((crossed - 1).abs().max()), 0.01, mistake=True),
            at_most("D A V from softmax", distance(times, softmax), 0.01, mistake=True),
        ],
        [
            "Row i of softmax is exp(q_i.k_j) / sum_j exp(q_i.k_j): row i of A by the i-th entry of A 1.",
            f"Checked with L = {length}, D = {width}: to {small(distance(normalised(exact, v), softmax))}.",
            "Weights of a series of degree 2 have other sums. Divided by their own, each row sums to 1;",
            f"divided by the exact sums, rows sum to {float(crossed.min()):.3f} ... {float(crossed.max()):.3f}.",
            f"Rows multiplied by D in the place of divided are {distance(times, softmax):,.0f} times too large.",
        ],
    )  # fmt: skip


REASSOCIATED: list[Term] = [(1, 1, 1)]  # L, M, D
AS_WRITTEN: list[Term] = [(2, 1, 0), (2, 0, 1)]


def linear_crossover(features: int) -> int:
    """The length from which phi(Q) (phi(K)^T V) takes less work than exact attention."""
    return features


@claim(
    6, "Multiplied from the right, phi(Q) (phi(K)^T V) costs O(L M D) and gives the same numbers; it takes less work "
    "than exact attention only for L above about M.",
    r"\phi(Q) \left(\phi(K)^T V\right) = \left(\phi(Q) \phi(K)^T\right) V, \quad O(L M D) \text{ against } O(L^2 D)",
)  # fmt: skip
def reassociated(setting: Setting) -> Finding:
    sizes, right, left, apart = [], [], [], 0.0
    for length, width, degree in product((32, 64, 128), (2, 4, setting.of(5, 6, 8)), (1, 2)):
        q, k, v = normal(3, length, width, seed=setting.seed, spread=0.5)
        a, b = (Taylor(degree + degree % 2)(x, is_query=False) for x in (q, k))
        sizes.append((length, a.shape[-1], width))
        right.append(flops(lambda a=a, b=b, v=v: a @ (b.mT @ v)))
        left.append(flops(lambda a=a, b=b, v=v: (a @ b.mT) @ v))
        apart = max(apart, distance(a @ (b.mT @ v), (a @ b.mT) @ v))
    of_right, _ = misfit(REASSOCIATED, sizes, right)
    of_left, _ = misfit(AS_WRITTEN, sizes, left)
    features = Taylor(2).size(64)
    found = subquad.crossover("exact", "taylor", head_dim=64)
    assert found is not None
    return Finding(
        [
            at_most("the two orders from each other", apart, ROUNDING),
            at_most(f"counted work from the right from {written(REASSOCIATED, 'LMD')}", of_right, 1e-6),
            at_most(f"counted work from the left from {written(AS_WRITTEN, 'LMD')}", of_left, 1e-6),
            equal("library's crossover, width 64, degree 2", found, linear_crossover(features), within=0.1),
        ],
        [
            "A product of three matrices does not depend on where it begins; its cost does.",
            "From the left, phi(Q) phi(K)^T is L x L: 2 L^2 M, and 2 L^2 D more for the values.",
            "From the right, phi(K)^T V is M x D, whatever L is: 2 L M D, and as much again for the queries.",
            f"Both orders agree to {small(apart)}, over {len(sizes)} shapes.",
            "Exact attention takes 4 L^2 D. 4 L M D is less once L > M.",
            f"At D = 64 and degree 2, M = {features:,}; the library, which also counts the normaliser, changes over at "
            f"{found:,}.",
        ],
        lambda: cost_curves(found),
    )  # fmt: skip


def cost_curves(found: int) -> bytes:
    figure_, (axes,) = axes_of(1)
    lengths = [2**i for i in range(6, 17)]
    forms: dict[str, Callable[[int], float]] = {
        "exact": lambda n: subquad.cost("exact", query_length=n, head_dim=64).flops,
        "Taylor, degree 2": lambda n: subquad.cost("taylor", query_length=n, head_dim=64, form="linear").flops,
        "256 random features": lambda n: subquad.cost("random", query_length=n, head_dim=64, form="linear").flops,
        "separable": lambda n: subquad.cost("separable", query_length=n, head_dim=64, form="linear").flops,
    }
    for name, work in forms.items():
        axes.loglog(lengths, [work(n) for n in lengths], "o-", markersize=3, label=name)
    axes.axvline(found, color="grey", linestyle=":", label=f"crossover of Taylor, L = {found:,}")
    axes.set(xlabel="tokens", ylabel="operations of a head of width 64")
    axes.legend(fontsize="small")
    return svg(figure_)


# --- 7 to 10: other kernels ---------------------------------------------------------------------------------------

SEPARABLE_TIME: list[Term] = [(1, 2)]  # L, D


def separable_rank(length: int, width: int) -> int:
    """The most that its weight matrix can have."""
    return min(length, width)


@claim(
    7, "Separable attention, softmax of queries over the width and of keys over the tokens, has rows that are "
    "distributions and costs O(L D^2); but its weight matrix has rank D at most, that of softmax attention up to L.",
    r"W = \mathrm{softmax}_D(Q) \, \mathrm{softmax}_L(K)^T, \quad W \mathbf{1} = \mathbf{1}, \quad "
    r"\mathrm{rank}\, W \le D",
)  # fmt: skip
def separable(setting: Setting) -> Finding:
    length, width = setting.of(24, 48, 72), 6
    q, k = normal(2, length, width, seed=setting.seed, spread=2.0)
    weights, exact = weights_of(q, k, Separable()), weights_of(q, k, Exact())
    rank = int(torch.linalg.matrix_rank(weights, rtol=1e-10))
    exact_rank = int(torch.linalg.matrix_rank(exact, rtol=1e-10))
    sizes, work = [], []
    for n, d in product((64, 128, 256), (4, 8, 16)):
        a, b, v = normal(3, n, d, seed=setting.seed)
        sizes.append((n, d))
        work.append(flops(lambda a=a, b=b, v=v: a.softmax(-1) @ (b.softmax(-2).mT @ v)))
    of_time, _ = misfit(SEPARABLE_TIME, sizes, work)
    by_hand = q.softmax(-1) @ k.softmax(-2).mT
    return Finding(
        [
            at_most("library's weights from the formula", distance(weights, by_hand), ROUNDING),
            at_least("smallest weight", float(weights.min()), 0.0),
            at_most("sums of rows from 1", float((weights.sum(-1) - 1).abs().max()), ROUNDING),
            at_most(f"counted work from {written(SEPARABLE_TIME, 'LD')}", of_time, 1e-6),
            equal(f"rank, L = {length}, D = {width}", rank, separable_rank(length, width)),
            at_least("rank of softmax attention", exact_rank, 3 * width),
        ],
        [
            "Each row of softmax(Q) sums to 1 over D; each column of softmax(K) sums to 1 over L.",
            "So a row of the product is a mean of D distributions over the tokens: it is one too.",
            f"Smallest weight {float(weights.min()):.1g}, sums of rows off by at most "
            f"{small(float((weights.sum(-1) - 1).abs().max()))}.",
            "A product of an L x D and a D x L matrix has rank D at most: D different rows, mixed.",
            f"Measured at L = {length}, D = {width}: rank {rank}; softmax attention of the same queries and keys has "
            f"{exact_rank}.",
        ],
    )  # fmt: skip


def estimate_variance(q: Tensor, k: Tensor, count: int) -> float:
    """Of the estimate of exp(q.k) by independent positive features."""
    return float((2 * q @ k).exp() * torch.expm1((q + k).square().sum()) / count)


def kernel(q: Tensor, k: Tensor) -> float:
    """What positive features estimate, without bias."""
    return float((q @ k).exp())


def estimates(q: Tensor, k: Tensor, matrices: Tensor, kind: str) -> Tensor:
    """phi(q).phi(k) by the library's features, one for each matrix (draws, rows, width)."""
    rows = matrices.shape[1]
    method = RandomFeatures(rows if kind == "positive" else 2 * rows, kind=kind)
    (a, s), (b, t) = (method.project(x.expand(len(matrices), 1, -1), matrices) for x in (q, k))
    return (a * b).sum((-1, -2)) * (s + t).exp()[:, 0]


def draws(count: int, rows: int, width: int, seed: int, orthogonal: bool) -> Tensor:
    """(count, rows, width), independent or orthogonal in blocks of `width`."""
    drawn = normal(count, rows, width, seed=seed)
    if not orthogonal:
        return drawn
    blocks = []
    for block in drawn.split(width, 1):
        basis, triangle = torch.linalg.qr(normal(count, width, width, seed=seed + 1))
        turned = (basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT[:, : block.shape[1]]
        blocks.append(turned * block.norm(dim=-1, keepdim=True))
        seed += 1
    return torch.cat(blocks, 1)


def pair(norm_of_sum: float, width: int, seed: int, angle: float = 0.5) -> tuple[Tensor, Tensor]:
    """q and k of equal length whose sum has this norm."""
    q, k = normal(2, width, seed=seed)
    q, k = q / q.norm(), k / k.norm()
    k = angle * q + math.sqrt(1 - angle**2) * (k - (k @ q) * q) / (k - (k @ q) * q).norm()
    return q * norm_of_sum / (q + k).norm(), k * norm_of_sum / (q + k).norm()


@claim(
    8, "exp(q.k) is the mean of exp(x.q - |q|^2/2) exp(x.k - |k|^2/2) over normal x: m draws estimate it without "
    "bias, with a "
    "variance that falls as 1/m and grows as exp(|q+k|^2). Orthogonal draws help where norms are small, not always.",
    r"e^{q \cdot k} = e^{-|q|^2/2} \, \mathbb{E}\left[e^{x \cdot q} e^{x \cdot k}\right] e^{-|k|^2/2}, \quad "
    r"\mathrm{Var} = \frac{e^{2 q \cdot k} \left(e^{|q+k|^2} - 1\right)}{m}",
)  # fmt: skip
def random_features(setting: Setting) -> Finding:
    width, count = setting.of(6, 8, 12), 20_000
    checks, ratios, lines = [], {}, []
    for norm in (0.3, 0.6, 1.0):
        q, k = pair(norm, width, setting.seed)
        found = estimates(q, k, draws(count, 4, width, setting.seed, False), "positive")
        error = abs(float(found.mean()) - kernel(q, k)) / float(found.std() / math.sqrt(count))
        checks.append(at_most(f"bias at |q+k| = {norm}, in standard errors", error, 4.5))
        ratios[norm] = float(found.var()) / estimate_variance(q, k, 4)
        checks.append(equal(f"variance at |q+k| = {norm} by the formula", ratios[norm], 1, within=0.2))
        lines.append(f"|q+k| = {norm}: mean {float(found.mean()):.4f} of {kernel(q, k):.4f}, "
                     f"variance {ratios[norm]:.3f} times the formula.")  # fmt: skip
    q, k = pair(1.0, width, setting.seed)
    few, many = (float(estimates(q, k, draws(count, m, width, setting.seed + m, False), "positive").var())
                 for m in (2, 32))  # fmt: skip
    checks.append(equal("variance of 2 features by that of 32", few / many, 32 / 2, within=0.2))
    gains = {}
    for kind, norm in (("positive", 1.0), ("trigonometric", 1.0), ("trigonometric", 5.0)):
        errors = []
        for orthogonal in (False, True):
            found = estimates(q * norm, k * norm, draws(count, width, width, setting.seed + 7, orthogonal), kind)
            errors.append(float((found - kernel(q * norm, k * norm)).square().mean()))
        gains[kind, norm] = errors[0] / errors[1]
    apart = float((q - k).norm())
    return Finding(
        [
            *checks,
            at_least("squared error, independent by orthogonal, positive, |q+k| = 1", gains["positive", 1.0], 1.02),
            at_least(f"the same, trigonometric, |q-k| = {apart:.2f}", gains["trigonometric", 1.0], 1.5),
            at_most(f"the same, trigonometric, |q-k| = {5 * apart:.2f}", gains["trigonometric", 5.0], 1.15),
        ],
        [
            "E[exp(x.y)] = exp(|y|^2/2) for x ~ N(0, I). With y = q + k, |q+k|^2 = |q|^2 + |k|^2 + 2 q.k,",
            "so E[exp(x.q) exp(x.k)] exp(-|q|^2/2 - |k|^2/2) = exp(q.k).",
            "The square of one estimate has the mean exp(2|q+k|^2 - |q|^2 - |k|^2) = exp(2 q.k + |q+k|^2);",
            "less the squared mean, exp(2 q.k), and divided by m, that is the variance.",
            *lines,
            f"2 features have {few / many:.1f} times the variance of 32.",
            f"Orthogonal draws have {gains['positive', 1.0]:.2f} times less squared error with positive features, "
            f"{gains['trigonometric', 1.0]:.2f} times with trigonometric ones; with those of q and k five times as "
            f"long, {gains['trigonometric', 5.0]:.2f} times.",
        ],
        lambda: error_by_features(setting),
    )  # fmt: skip


def error_by_features(setting: Setting) -> bytes:
    """Root mean square, relative, of the kernel at |q+k| = 1, width 16."""
    figure_, (axes,) = axes_of(1)
    q, k = pair(1.0, 16, setting.seed)
    counts = [8, 16, 32, 64, 128, 256]
    for name, kind, orthogonal in (("independent", "positive", False), ("orthogonal", "positive", True),
                                   ("orthogonal, hyperbolic", "hyperbolic", True)):  # fmt: skip
        errors = []
        for m in counts:
            rows = m if kind == "positive" else m // 2
            found = estimates(q, k, draws(1000, rows, 16, setting.seed + m, orthogonal), kind)
            errors.append(float((found / kernel(q, k) - 1).square().mean().sqrt()))
        axes.loglog(counts, errors, "o-", markersize=3, label=name)
    axes.set(xlabel="features m", ylabel="relative error of exp(q.k)")
    axes.set_xticks(counts, [str(m) for m in counts])
    axes.set_yticks(shares := [0.03, 0.05, 0.1, 0.2, 0.5], [f"{share:.0%}" for share in shares])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    return svg(figure_)


WITHOUT_RIGHT: list[Term] = [(1, 2)]  # L, D
WITHOUT_LEFT: list[Term] = [(2, 1)]


@claim(
    9, "Without the exponential, q (K^T V) costs O(L D^2); as written, (q K^T) V is O(L^2 D). About half of the "
    "weights are negative, so their sum can vanish and cannot serve as a normaliser.",
    r"Q (K^T V) = (Q K^T) V, \quad O(L D^2) \text{ against } O(L^2 D)",
)  # fmt: skip
def without_exponential(setting: Setting) -> Finding:
    sizes, right, left, apart = [], [], [], 0.0
    for n, d in product((32, 64, 128), (4, 8, 16)):
        q, k, v = normal(3, n, d, seed=setting.seed)
        sizes.append((n, d))
        right.append(flops(lambda q=q, k=k, v=v: q @ (k.mT @ v)))
        left.append(flops(lambda q=q, k=k, v=v: (q @ k.mT) @ v))
        own = subquad.attention(q[None], k[None], v[None], scale=1.0, method=Linear())[0]
        apart = max(apart, distance(q @ (k.mT @ v), own), distance((q @ k.mT) @ v, own))
    of_right, _ = misfit(WITHOUT_RIGHT, sizes, right)
    of_left, _ = misfit(WITHOUT_LEFT, sizes, left)
    length = setting.of(400, 800, 1600)
    q, k = normal(2, length, 16, seed=setting.seed)
    weights = q @ k.mT
    negative = float((weights < 0).double().mean())
    shares = weights.sum(-1).abs() / weights.abs().sum(-1)
    exact = weights.exp().sum(-1) / weights.exp().abs().sum(-1)
    return Finding(
        [
            at_most("both orders from the library", apart, ROUNDING),
            at_most(f"counted work from the right from {written(WITHOUT_RIGHT, 'LD')}", of_right, 1e-6),
            at_most(f"counted work from the left from {written(WITHOUT_LEFT, 'LD')}", of_left, 1e-6),
            equal("share of negative weights", negative, 0.5, within=0.05),
            at_most("smallest |sum of weights| by the sum of |weights|", float(shares.min()), 0.01),
            equal("the same with the exponential", float(exact.min()), 1),
        ],
        [
            "K^T V is D x D; making it takes 2 L D^2, and reading it with L queries as much again.",
            f"Counted: both orders as said, and equal to {small(apart)}.",
            "For inputs without a preferred direction q.k is positive as often as negative:",
            f"{negative:.2%} of {length:,} x {length:,} weights are negative.",
            f"The weights of a row then nearly cancel: in the worst row their sum is {float(shares.min()):.1g} of what "
            "they sum to without signs. Divided by that, an output is far outside of all values.",
            "exp(q.k) is positive, and nothing cancels.",
        ],
    )  # fmt: skip


def copied_weight(size: float) -> tuple[float, float]:
    """w11 = w33, and w22, for orthogonal vectors of norm B."""
    once, twice = math.exp(-(size**2)), math.exp(-2 * size**2)
    return 1 / (1 + once + twice), 1 / (1 + 2 * once)


def copied_norm(size: float) -> float:
    return math.sqrt(2) * size


@claim(
    10, "x1 = d + b, x2 = a, x3 = c + d with orthogonal a, b, c, d of norm B, as queries, keys and values without "
    "scaling: attention copies each, but only as B grows.",
    r"|x_1| = \sqrt{2} B, \quad x_1 \cdot x_3 = B^2, \quad w_{11} = w_{33} = \frac{1}{1 + e^{-B^2} + e^{-2 B^2}}, "
    r"\quad w_{22} = \frac{1}{1 + 2 e^{-B^2}}",
    "|x1| = 2 B, as if norms added; and x1.x3 = 0, so that w11 = 1 / (1 + 2 exp(-2 B^2)).",
)  # fmt: skip
def copying(setting: Setting) -> Finding:
    width = setting.of(4, 8, 16)
    basis = torch.linalg.qr(normal(width, width, seed=setting.seed))[0]
    checks, errors, lines = [], [], []
    for size in (0.5, 1.0, 2.0, 3.0):
        a, b, c, d = basis[:4] * size
        x = torch.stack([d + b, a, c + d])
        weights = weights_of(x, x, Exact())
        out = subquad.attention(x[None], x[None], x[None], scale=1.0)[0]
        errors.append(distance(out, x))
        w11, w22 = copied_weight(size)
        checks += [equal(f"w11 at B = {size}", float(weights[0, 0]), w11), equal(f"w22 at B = {size}",
                   float(weights[1, 1]), w22), equal(f"w33 at B = {size}", float(weights[2, 2]), w11)]  # fmt: skip
        lines.append(f"B = {size}: w11 = {float(weights[0, 0]):.4f}, w22 = {float(weights[1, 1]):.4f}, "
                     f"output off by {errors[-1]:.2g}.")  # fmt: skip
        if size == 1.0:
            norm, product_13, first = float(x[0].norm()), float(x[0] @ x[2]), float(weights[0, 0])
    return Finding(
        [
            *checks,
            equal("|x1| at B = 1", norm, copied_norm(1.0)),
            at_most("copies at B = 3, relative error", errors[-1], 1e-3),
            at_least("at B = 0.5", errors[0], 0.1),
            equal("|x1| at B = 1", norm, 2.0, mistake=True),
            equal("w11 at B = 1", first, 1 / (1 + 2 * math.exp(-2)), mistake=True),
        ],
        [
            f"d and b are orthogonal: |d + b|^2 = |d|^2 + |b|^2 = 2 B^2, so |x1| = {norm:.4f} at B = 1, not 2.",
            f"x1 and x3 share d: x1.x3 = d.d = B^2, {product_13:.4f} at B = 1; x1.x2 = 0 and x1.x1 = 2 B^2.",
            "Divided by exp(2 B^2), the weights of x1 are 1, exp(-2 B^2) and exp(-B^2).",
            "x2.x2 = B^2, and x2 is orthogonal to the others: 1, and exp(-B^2) twice.",
            *lines,
            f"With x1.x3 = 0 one would expect w11 = {1 / (1 + 2 * math.exp(-2)):.4f} at B = 1.",
        ],
    )  # fmt: skip
