"""The scale of positive random features, and the couplings of their draws.

phi(y) = (1 - 4A)^(d/4) exp(A |x|^2 + sqrt(1 - 4A) x.y - |y|^2/2) / sqrt(m)        m draws x ~ N(0, I), f = |q+k|^2

m Var / exp(2 q.k) = G exp(f rho) - 1,    rho = 1 / (1 - 8A),    G = ((rho + 1) / (2 sqrt(rho)))^d
"""

import math
from typing import Any

import subquad
from subquad import RandomFeatures
from subquad_lab.figures.plots import axes_of, svg
from subquad_lab.theory.attention.features import bias, drawn, estimates, kernel, pairs
from subquad_lab.theory.claims import Check, Finding, Setting, at_least, at_most, claim, equal

NORMS = (0.5, 1.0, 2.0)  # |q+k|^2 of the checks
PLOTTED_NORMS = (0.25, 0.5, 1.0, 2.0, 4.0)
PLOTTED_WIDTH, PLOTTED_DRAWS = 16, 1 << 15


def best_scale(width: int, square: float) -> float:
    """Return the scale A with the least variance: rho solves 2 f rho^2 + (2 f + d) rho - d = 0."""
    rho = (math.sqrt((2 * square + width) ** 2 + 8 * square * width) - 2 * square - width) / (4 * square)
    return (1 - 1 / rho) / 8


def scaled_variance(width: int, square: float, scale: float) -> float:
    """Return the variance of one positive feature, divided by exp(2 q.k)."""
    rho = 1 / (1 - 8 * scale)
    return math.expm1(square * rho + width * math.log((rho + 1) / (2 * math.sqrt(rho))))


def mistaken_constant(width: int, scale: float) -> float:
    """Return the factor of all estimates if phi has the constant of a product, (1 - 4A)^(d/2)."""
    return math.exp(width / 2 * math.log(1 - 4 * scale))


def mistaken_scale(width: int, square: float) -> float:
    """Return A with rho instead of 1/rho, which is above 0."""
    return (1 - 1 / (1 - 8 * best_scale(width, square))) / 8


def predicted(width: int, square: float, scale: float, kind: Any = "positive") -> float:
    """Return the variance that the library predicts for one feature, divided by exp(2 q.k)."""
    method = RandomFeatures(2, kind, scale=scale)
    found = subquad.error(method, logit_range=0, squared_norm=square, head_dim=width).relative
    assert found is not None
    return 2 * found**2


def of_scale(width: int, square: float, seed: int) -> tuple[list[Check], str]:
    """Check the estimate with the optimal scale for pairs with |q+k|^2 = square."""
    q, k = pairs(math.sqrt(square), 0.5, width, seed)
    scale = subquad.optimal_scale(width, square)
    found = estimates(q, k, drawn(4, width, seed, "independent"), "positive", scale)
    variance = 4 * float(found.var(0).mean()) / kernel(q, k) ** 2
    formula, plain = scaled_variance(width, square, scale), math.expm1(square)
    others = [scaled_variance(width, square, factor * scale) for factor in (0.5, 0.9, 1.1, 2.0)]
    checks = [
        at_most(f"bias at |q+k|^2 = {square:g}, in standard errors", bias(found, kernel(q, k)), 6.0),
        equal(f"variance at |q+k|^2 = {square:g} / formula", variance / formula, 1, within=0.15),
        equal("`error` of the library / formula", predicted(width, square, scale) / formula, 1),
        equal("`optimal_scale` of the library / formula", scale / best_scale(width, square), 1),
        at_least("variance at 0.5, 0.9, 1.1 and 2 times this scale / variance", min(others) / formula, 1.0),
    ]
    line = (f"|q+k|^2 = {square:g}: A = {scale:.4f}, mean {float(found.mean()) / kernel(q, k):.4f} of 1, variance "
            f"{variance:.3f}; formula {formula:.3f}, and {plain:.3f} at A = 0.")  # fmt: skip
    return checks, line


@claim(
    23, "Positive features are unbiased for every A < 1/8 in exp(A |x|^2), with the right constant. The A with the "
    "least variance is negative and follows from d and |q+k|^2; the larger |q+k|, the more it gains. Simplex draws "
    "reduce the variance for small norms.",
    r"\phi(y) = \frac{(1 - 4A)^{d/4}}{\sqrt{m}} \, e^{A |x|^2 + \sqrt{1 - 4A} \, x \cdot y - |y|^2/2}, \quad "
    r"A = \frac{1}{8}\left(1 - \frac{1}{\rho}\right), \quad "
    r"\rho = \frac{\sqrt{(2f + d)^2 + 8fd} - 2f - d}{4f}, \quad f = |q+k|^2",
    "the constant (1 - 4A)^(d/2) for each of q and k, which counts it twice; or A = (1 - rho) / 8, which is above 0.",
)  # fmt: skip
def scaled_features(setting: Setting) -> Finding:
    width, seed = setting.of(6, 8, 12), setting.seed
    checks, lines = [], []
    for square in NORMS:
        found, line = of_scale(width, square, seed)
        checks += found
        lines.append(line)
    q, k = pairs(0.5, 0.5, width, seed)
    scale = subquad.optimal_scale(width, 0.25)
    coupled = {coupling: estimates(q, k, drawn(width, width, seed, coupling), "positive", scale)
               for coupling in ("independent", "orthogonal", "simplex")}  # fmt: skip
    shares = {coupling: float(found.var(0).mean() / coupled["independent"].var(0).mean())
              for coupling, found in coupled.items()}  # fmt: skip
    of_pairs = estimates(q, k, drawn(width, width, seed, "independent"), "hyperbolic", scale)
    by_pairs = (
        2 * width * float(of_pairs.var(0).mean()) / kernel(q, k) ** 2 / predicted(width, 0.25, scale, "hyperbolic")
    )
    fewer = {d: math.expm1(8.0) / scaled_variance(d, 8.0, best_scale(d, 8.0)) for d in (16, 64)}
    wrong = predicted(width, 1.0, mistaken_scale(width, 1.0)) / math.expm1(1.0)
    twice = mistaken_constant(width, scale) * float(coupled["independent"].mean()) / kernel(q, k)
    return Finding(
        [
            *checks,
            equal("variance of hyperbolic features at |q+k|^2 = 0.25 / prediction", by_pairs, 1, within=0.15),
            at_least("features for the same error at |q+k|^2 = 8, A = 0 / optimal A, width 16", fewer[16], 15),
            at_least("the same, width 64", fewer[64], 3),
            at_most("bias of simplex draws, in standard errors", bias(coupled["simplex"], kernel(q, k)), 6.0),
            at_most("variance of simplex draws / of orthogonal draws, |q+k| = 0.5",
                    shares["simplex"] / shares["orthogonal"], 0.5),
            at_most("(1 - 4A)^(d/2) for q and for k: estimate / exp(q.k) - 1", twice - 1, 0.01, mistake=True),
            at_most("A = (1 - rho) / 8: variance / variance at A = 0", wrong, 1.0, mistake=True),
        ],
        [
            "A normal x has the density exp(-|x|^2/2); with the factor exp(2A |x|^2) of a product of features, its "
            "exponent is -(1 - 4A) |x|^2/2. Substituting x / sqrt(1 - 4A) gives (1 - 4A)^(-d/2), which the constants "
            "of q and k cancel, and exp(|q+k|^2/2) as at A = 0.",
            "The square has the factor exp(4A |x|^2), so its mean needs 1 - 8A > 0: G exp(f rho).",
            "The derivative of ln G + f rho by rho vanishes where 2 f rho^2 + (2f + d) rho = d, at a rho below 1, so A "
            "is below 0.",
            *lines,
            f"At |q+k|^2 = 8, A = 0 needs {fewer[16]:.0f} times the features at width 16, and {fewer[64]:.1f} times at "
            "width 64.",
            f"At |q+k| = 0.5, orthogonal draws have {shares['orthogonal']:.2f} times the variance of independent "
            f"draws, and simplex draws {shares['simplex']:.2f} times.",
            f"With the constant of a product in each feature, estimates at |q+k| = 0.5 are {twice:.2f} times too "
            "large; in attention, the factor cancels. With A = (1 - rho) / 8 the variance at |q+k| = 1 is "
            f"{wrong:.2f} times that of A = 0.",
        ],
        lambda: variance_by_norm(setting),
    )  # fmt: skip


def variance_by_norm(setting: Setting) -> bytes:
    """Plot the variance of a feature against |q+k|^2 at width 16: lines by the formula, marks as measured."""
    figure, (axes,) = axes_of(1)
    squares = [0.25 * 2 ** (i / 4) for i in range(25)]
    lines: dict[str, tuple[Any, bool]] = {
        "FAVOR+": ("positive", False), "hyperbolic": ("hyperbolic", False), "optimal A": ("positive", True),
        "hyperbolic, optimal A": ("hyperbolic", True),
    }  # fmt: skip
    width = PLOTTED_WIDTH

    def scale_of(square: float, is_scaled: bool) -> float:
        return subquad.optimal_scale(width, square) if is_scaled else 0.0

    def measured(square: float, kind: Any, is_scaled: bool, coupling: str) -> float:
        q, k = pairs(math.sqrt(square), 0.5, width, setting.seed)
        matrices = drawn(width, width, setting.seed, coupling, of_all=PLOTTED_DRAWS)
        found = estimates(q, k, matrices, kind, scale_of(square, is_scaled)) / kernel(q, k)
        return width * (1 if kind == "positive" else 2) * float(found.var(0).mean())

    for name, (kind, is_scaled) in lines.items():
        formula = [predicted(width, square, scale_of(square, is_scaled), kind) for square in squares]
        (line,) = axes.loglog(squares, formula, label=name)
        marks = [measured(square, kind, is_scaled, "independent") for square in PLOTTED_NORMS]
        axes.loglog(PLOTTED_NORMS, marks, "o", markersize=4, color=line.get_color())
    for name, is_scaled in (("simplex, measured", False), ("simplex, optimal A, measured", True)):
        marks = [measured(square, "positive", is_scaled, "simplex") for square in PLOTTED_NORMS]
        axes.loglog(PLOTTED_NORMS, marks, "s--", markersize=3, label=name)
    axes.set(xlabel="|q+k|$^2$", ylabel="features times relative variance", ylim=(1e-2, 1e5))
    axes.legend(fontsize="small")
    return svg(figure)
