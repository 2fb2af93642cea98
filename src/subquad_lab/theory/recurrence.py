"""What recurrent networks remember, and how their gradients fade.

W the recurrent matrix, s the activation, T steps; |s'| <= gamma. |.| of a matrix is its largest singular value.
"""

import math
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad_lab.models.cells import Activation, after_activation, alternating_sum, before_activation
from subquad_lab.models.language import SigmoidRNN
from subquad_lab.plots import axes_of, svg
from subquad_lab.theory import Finding, Setting, at_least, at_most, claim, equal, small
from subquad_lab.theory.attention import ROUNDING, normal

ACTIVATIONS: dict[str, Activation] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "sin": torch.sin,
}


def scaled(matrices: Tensor, size: float | Tensor) -> Tensor:
    """With this largest singular value."""
    return matrices * (size / torch.linalg.matrix_norm(matrices, 2))[..., None, None]


# --- 11 -----------------------------------------------------------------------------------------------------------


def one_from_the_other(h: Tensor, s: Activation) -> Tensor:
    """The states after the activation, from those before it."""
    return s(h)


@claim(
    11, "Whether the activation is applied before the matrix or after the sum, the recurrence is the same, for any "
    "activation.",
    r"h_t = W s(h_{t-1}) + U x_t + b, \quad g_t = s(W g_{t-1} + U x_t + b), \quad g_t = s(h_t)",
)  # fmt: skip
def two_forms(setting: Setting) -> Finding:
    width, steps = setting.of(4, 8, 16), setting.of(10, 20, 40)
    w = scaled(normal(width, width, seed=setting.seed), 1.5)
    u, b = normal(width, 3, seed=setting.seed + 1), normal(width, seed=setting.seed + 2)
    start, inputs = normal(width, seed=setting.seed + 3), normal(steps, 3, seed=setting.seed + 4)
    apart = {}
    for name, s in ACTIVATIONS.items():
        h = before_activation(w, u, b, s, start, inputs)
        g = after_activation(w, u, b, s, s(start), inputs)
        apart[name] = float((g - one_from_the_other(h, s)).abs().max() / g.abs().max())
    return Finding(
        [at_most(f"{name}: the two forms over {steps} steps", error, ROUNDING) for name, error in apart.items()],
        [
            "Let g_t = s(h_t), and g_0 = s(h_0). Then h_t = W g_{t-1} + U x_t + b, by the first form;",
            "s on both sides gives g_t = s(W g_{t-1} + U x_t + b), which is the second.",
            "Nothing was asked of s. The states differ by s, the sequence of outputs does not.",
            *(f"{name}: apart by {small(error)} after {steps} steps." for name, error in apart.items()),
        ],
    )  # fmt: skip


# --- 12 and 13 ----------------------------------------------------------------------------------------------------


def step_jacobian(w: Tensor, slope: Tensor) -> Tensor:
    """dh_t / dh_{t-1} (..., n, n), from s'(h_{t-1}) (..., n)."""
    return w * slope[..., None, :]


def vanishing_bound(delta: float, steps: int) -> float:
    return delta**steps


def largest_eigenvalue(delta: float, gamma: float) -> float:
    """Of W^T W, up to which the gradient is at most delta^T."""
    return (delta / gamma) ** 2


def gradients(w: Tensor, start: Tensor, inputs: Tensor) -> Tensor:
    """|dh_t / dh_0| (t, networks) of h_t = W tanh(h_{t-1}) + x_t, by the chain rule; w (networks, n, n)."""
    h, whole, norms = start, torch.eye(w.shape[-1], dtype=w.dtype).expand_as(w), []
    for x in inputs:
        whole = step_jacobian(w, 1 - torch.tanh(h) ** 2) @ whole
        h = (w @ torch.tanh(h)[..., None])[..., 0] + x
        norms.append(torch.linalg.matrix_norm(whole, 2))
    return torch.stack(norms)


NETWORKS = 1000


@claim(
    12, "The gradient through one step is W diag(s'(h)); if the largest eigenvalue of W^T W is at most delta^2 / "
    "gamma^2, the gradient through T steps is at most delta^T, so for delta < 1 it vanishes.",
    r"\frac{\partial h_t}{\partial h_{t-1}} = W \,\mathrm{diag}(s'(h_{t-1})), \quad \lambda_1(W^T W) \le "
    r"\frac{\delta^2}{\gamma^2} \Rightarrow \left|\frac{\partial h_T}{\partial h_0}\right| \le \delta^T",
)  # fmt: skip
def vanishing(setting: Setting) -> Finding:
    width, steps = setting.of(4, 6, 10), 25
    deltas = torch.linspace(0.5, 0.99, NETWORKS, dtype=torch.float64)
    sizes = torch.tensor([math.sqrt(largest_eigenvalue(float(d), 1.0)) for d in deltas], dtype=torch.float64)
    w = scaled(normal(NETWORKS, width, width, seed=setting.seed), sizes)
    start = normal(NETWORKS, width, seed=setting.seed + 1, spread=0.3)
    norms = gradients(w, start, normal(steps, NETWORKS, width, seed=setting.seed + 2, spread=0.3))
    bounds = torch.tensor([[vanishing_bound(float(d), t) for d in deltas] for t in range(1, steps + 1)])
    violations = int((norms > bounds * (1 + 1e-12)).sum())
    h = normal(width, seed=setting.seed + 3)
    by_autograd = torch.autograd.functional.jacobian(lambda h: w[-1] @ torch.tanh(h), h)
    apart = float((step_jacobian(w[-1], 1 - torch.tanh(h) ** 2) - by_autograd).norm() / by_autograd.norm())
    worst = float((norms[-1] / bounds[-1]).max())
    return Finding(
        [
            at_most("W diag(s') from autograd's", apart, ROUNDING),
            equal(f"violations of delta^t in {NETWORKS:,} networks, t = 1 to {steps}", violations, 0),
            at_most(f"largest gradient by delta^T, T = {steps}", worst, 1.0),
        ],
        [
            "h_t = W s(h_{t-1}) + U x_t + b. Its derivative by h_{t-1} is W times the diagonal of s'(h_{t-1}),",
            f"which autograd confirms to {small(apart)}.",
            "|W diag(s')| <= |W| gamma, and |W|^2 is the largest eigenvalue of W^T W: at most delta each step.",
            "A product of T such factors is at most delta^T.",
            f"{NETWORKS:,} random networks of width {width}, tanh (gamma = 1), delta from 0.5 to 0.99, {steps} steps: "
            f"{violations} violations; the nearest came to {worst:.2f} of its bound.",
        ],
        lambda: gradient_picture(setting),
    )  # fmt: skip


def gradient_picture(setting: Setting) -> bytes:
    """Gradient norms over time, with the bound, for several sizes of W."""
    figure, (axes,) = axes_of(1)
    steps, width = 40, 12
    inputs = normal(steps, 1, width, seed=setting.seed + 2, spread=0.3)
    for colour, size in enumerate((0.6, 0.9, 1.0, 1.3, 2.0)):
        w = scaled(normal(1, width, width, seed=setting.seed), torch.tensor([size], dtype=torch.float64))
        norms = gradients(w, normal(1, width, seed=setting.seed + 1, spread=0.3), inputs)[:, 0]
        axes.semilogy(range(1, steps + 1), norms, color=f"C{colour}", label=f"|W| = {size}")
        axes.semilogy(range(1, steps + 1), [size**t for t in range(1, steps + 1)], ":", color=f"C{colour}")
    axes.set(xlabel="steps T", ylabel="|dh_T / dh_0|, dotted: its bound", ylim=(1e-12, 1e12))
    axes.legend(fontsize="small")
    return svg(figure)


def explosion_threshold(gamma: float) -> float:
    """Of the largest eigenvalue of W^T W: below it nothing explodes."""
    return 1 / gamma**2


@claim(
    13, "A gradient can explode only if the largest eigenvalue of W^T W is above 1 / gamma^2. That is necessary and "
    "not sufficient: a saturated unit vanishes all the same.",
    r"\left|\frac{\partial h_T}{\partial h_0}\right| \to \infty \;\Rightarrow\; \lambda_1(W^T W) > \frac{1}{\gamma^2}",
    "A largest eigenvalue above the threshold is enough; or the threshold is 1 / gamma.",
)  # fmt: skip
def exploding(setting: Setting) -> Finding:
    steps, eigenvalue = setting.of(20, 40, 60), 2.25
    w = math.sqrt(eigenvalue)

    def scalar(bias: float, activation: Activation, weight: float) -> float:
        h0 = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
        constants = [torch.tensor([[weight]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64),
                     torch.tensor([bias], dtype=torch.float64)]  # fmt: skip
        states = before_activation(*constants, activation, h0, torch.zeros(steps, 1, dtype=torch.float64))
        return float(torch.autograd.grad(states[-1, 0], h0)[0].abs())

    saturated, linear = scalar(3.0, torch.tanh, w), scalar(0.0, lambda x: x, w)
    below = math.sqrt(explosion_threshold(0.25) * 0.99)  # of a sigmoid, whose slope is at most 1/4
    networks, width = 200, setting.of(4, 6, 8)
    matrices = scaled(normal(networks, width, width, seed=setting.seed), below)
    h = normal(networks, width, seed=setting.seed + 1)
    whole = torch.eye(width, dtype=torch.float64).expand(networks, -1, -1)
    for x in normal(steps, networks, width, seed=setting.seed + 2):
        slope = torch.sigmoid(h) * (1 - torch.sigmoid(h))
        whole = step_jacobian(matrices, slope) @ whole
        h = (matrices @ torch.sigmoid(h)[..., None])[..., 0] + x
    below_all = float(torch.linalg.matrix_norm(whole, 2).max())
    return Finding(
        [
            at_most(f"gradient of a linear unit, lambda_1 = {eigenvalue}, T = {steps}, by 1.5^T",
                    abs(linear / w**steps - 1), 1e-9),
            at_least("lambda_1 of the saturated unit", eigenvalue, explosion_threshold(1.0)),
            at_most("gradient of the saturated unit", saturated, 1e-6),
            at_most(f"largest gradient of {networks} sigmoid networks just below the threshold", below_all, 1.0),
            at_least("gradient of the saturated unit, were the eigenvalue enough", saturated, 1.0, mistake=True),
            at_least("the same networks, above 1 / gamma = 4, were that the threshold", below_all, 1.0, mistake=True),
        ],
        [
            "If lambda_1 <= 1 / gamma^2, every factor is at most 1, and no product of them exceeds 1.",
            "So a gradient that explodes needs lambda_1 > 1 / gamma^2. The reverse does not follow:",
            "gamma is the steepest slope of s, and a unit need not be where s is steep.",
            f"lambda_1 = {eigenvalue}, no activation: the gradient is 1.5^{steps} = {linear:.3g}.",
            f"The same with tanh and a bias of 3: s' is nearly 0, and the gradient is {saturated:.1g}.",
            f"gamma of a sigmoid is 1/4, so its threshold is 16, not 4: {networks} networks with lambda_1 = "
            f"{below**2:.1f} have gradients of at most {below_all:.1g}.",
        ],
    )  # fmt: skip


# --- 14 to 16 -----------------------------------------------------------------------------------------------------


def even_wins(inputs: Tensor) -> Tensor:
    """What the unit tells: 1 if the inputs at places 2, 4, ... sum to more than those at 1, 3, ...; 0.5 on a tie."""
    return (torch.sign(inputs[..., 1::2].sum(-1) - inputs[..., 0::2].sum(-1)) + 1) / 2


@claim(
    14, "h_t = x_t - h_{t-1} from h_0 = 0, with y = sigmoid(1000 h_T) and T even, tells whether the inputs at even "
    "places sum to more than those at odd ones; a tie is 0.5.",
    r"h_T = \sum_{t \text{ even}} x_t - \sum_{t \text{ odd}} x_t",
)  # fmt: skip
def alternating(setting: Setting) -> Finding:
    length = setting.of(6, 8, 10)
    bits = torch.tensor(list(product((0.0, 1.0), repeat=length)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(setting.seed)
    drawn = torch.randint(-9, 10, (2000, 2 * length), generator=generator).double()
    wrong = sum(int((alternating_sum(x).sub(even_wins(x)).abs() > 1e-9).sum()) for x in (bits, drawn))
    ties = int((even_wins(bits) == 0.5).sum())
    return Finding(
        [
            equal(f"wrong answers for all {len(bits):,} sequences of {length} bits and 2,000 of numbers", wrong, 0),
            equal("ties among the bits", ties, math.comb(length, length // 2)),
        ],
        [
            "h_1 = x_1, h_2 = x_2 - x_1, h_3 = x_3 - x_2 + x_1: each step turns all signs and adds one input.",
            "After an even number of steps the even places have a plus and the odd ones a minus.",
            "sigmoid(1000 h) is 1 for h >= 1 and 0 for h <= -1, to all digits; at h = 0 it is 0.5.",
            f"All {len(bits):,} sequences of {length} bits, {ties} of them ties, and 2,000 of whole numbers: {wrong} "
            f"wrong.",
        ],
    )  # fmt: skip


def language_model_shapes(words: int, embedding: int, width: int) -> dict[str, tuple[int, ...]]:
    """As in the equations; torch's linear layers keep I and H transposed."""
    return {"L": (words, embedding), "H": (width, width), "I": (embedding, width), "U": (width, words), "b1": (width,),
            "b2": (words,)}  # fmt: skip


def one_step_gradients(
    e: Tensor, before: Tensor, h: Tensor, y: Tensor, wanted: Tensor, parts: dict[str, Tensor]
) -> dict:
    """Of the cross-entropy of one step, by hand; all vectors are rows (1, n)."""
    d1 = y - wanted
    d2 = (d1 @ parts["U"].mT) * h * (1 - h)
    return {"U": h.mT @ d1, "b2": d1[0], "I": e.mT @ d2, "H": before.mT @ d2, "b1": d2[0], "e": d2 @ parts["I"].mT,
            "h'": d2 @ parts["H"].mT}  # fmt: skip


@claim(
    15, "The sizes of a recurrent language model, and its gradients through one step, as they are derived by hand.",
    r"h = \sigma(h' H + e I + b_1), \; \hat y = \mathrm{softmax}(h U + b_2); \quad \delta_1 = \hat y - y, \; "
    r"\delta_2 = (\delta_1 U^T) \odot h \odot (1 - h)",
)  # fmt: skip
def language_model(setting: Setting) -> Finding:
    words, embedding, width = setting.of(7, 11, 19), setting.of(3, 4, 6), setting.of(4, 5, 8)
    torch.manual_seed(setting.seed)
    model = SigmoidRNN(words, embedding, width, dropout=0.0, tied=False).double()
    before = normal(1, width, seed=setting.seed + 1).sigmoid().requires_grad_()
    word, target = torch.tensor([[2]]), 5
    logits, h = model(word, before)
    loss = F.cross_entropy(logits[0], torch.tensor([target]))
    assert model.embedding.outward is not None
    parts = {"L": model.embedding.inward, "H": model.recurrent.weight.mT, "I": model.inward.weight.mT,
             "U": model.embedding.outward.mT, "b1": model.inward.bias, "b2": model.embedding.bias}  # fmt: skip
    own = [model.embedding.outward, model.embedding.bias, model.inward.weight, model.recurrent.weight,
           model.inward.bias, model.embedding.inward, before]  # fmt: skip
    du, db2, di, dh, db1, dl, dbefore = torch.autograd.grad(loss, own)
    by_autograd = {"U": du.mT, "b2": db2, "I": di.mT, "H": dh.mT, "b1": db1, "e": dl[2:3], "h'": dbefore}
    wanted = F.one_hot(torch.tensor([target]), words).double()
    by_hand = one_step_gradients(model.embedding.inward[2:3], before, h, logits[0].softmax(-1), wanted, parts)
    apart = {of: float((by_hand[of].detach() - found).norm() / found.norm()) for of, found in by_autograd.items()}
    differences = finite_difference(model, before.detach(), word, target)
    apart_of_differences = float((differences - dh).norm() / dh.norm())
    shapes = language_model_shapes(words, embedding, width)
    wrong = sum(tuple(parts[name].shape) != shape for name, shape in shapes.items())
    return Finding(
        [
            equal("matrices and vectors of another shape than said", wrong, 0),
            *(at_most(f"d{name} by hand from autograd's", error, ROUNDING) for name, error in apart.items()),
            at_most("dH from finite differences", apart_of_differences, 1e-6),
        ],
        [
            "The cross-entropy of a softmax has the gradient y^ - y by its inputs: call it d1.",
            "h U + b2 gives dU = h^T d1, db2 = d1, and d1 U^T to h.",
            "The sigmoid's slope is h (1 - h): d2 = (d1 U^T) h (1 - h) is what reaches h' H + e I + b1.",
            "So dI = e^T d2, dH = h'^T d2, db1 = d2, de = d2 I^T, dh' = d2 H^T.",
            f"Sizes with {words} words, embedding {embedding}, width {width}: "
            + ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items()) + ".",
            f"By hand from autograd: at most {small(max(apart.values()))}; dH from finite differences: "
            f"{small(apart_of_differences)}.",
        ],
    )  # fmt: skip


@torch.no_grad()
def finite_difference(model: SigmoidRNN, before: Tensor, word: Tensor, target: int, step: float = 1e-5) -> Tensor:
    """Of the loss by each entry of the recurrent matrix."""
    weight = model.recurrent.weight
    found = torch.zeros_like(weight)

    def loss() -> Tensor:
        return F.cross_entropy(model(word, before)[0][0], torch.tensor([target]))

    for place in product(*map(range, weight.shape)):
        kept = weight[place].clone()
        weight[place] = kept + step
        above = loss()
        weight[place] = kept - step
        found[place] = (above - loss()) / (2 * step)
        weight[place] = kept
    return found


def perplexity(cross_entropy: float) -> float:
    return math.exp(cross_entropy)


@claim(
    16, "Perplexity, the inverse of the geometric mean of the probabilities of the words, is the exponential of the "
    "cross-entropy.",
    r"\left(\prod_t p_t\right)^{-1/T} = \exp\left(-\frac{1}{T} \sum_t \log p_t\right)",
)  # fmt: skip
def perplexity_is_exponential(setting: Setting) -> Finding:
    words, length = setting.of(5, 9, 17), setting.of(12, 24, 48)
    torch.manual_seed(setting.seed)
    model = SigmoidRNN(words, 4, 6, dropout=0.0, tied=False).double()
    text = torch.randint(words, (1, length + 1), generator=torch.Generator().manual_seed(setting.seed))
    with torch.no_grad():
        logits, _ = model(text[:, :-1])
    entropy = float(F.cross_entropy(logits[0], text[0, 1:]))
    probabilities = logits[0].softmax(-1).gather(1, text[0, 1:, None])
    geometric = float(probabilities.prod()) ** (-1 / length)
    uniform = float(F.cross_entropy(torch.zeros(3, words, dtype=torch.float64), torch.tensor([0, 1, 2])))
    return Finding(
        [
            equal("inverse geometric mean of the probabilities", geometric, perplexity(entropy)),
            equal(f"perplexity of a model that knows nothing of {words} words", perplexity(uniform), words),
        ],
        [
            "The logarithm of the geometric mean of p_1 ... p_T is the mean of log p_t;",
            "the cross-entropy is that mean with its sign turned.",
            f"A model of {words} words on a text of {length}: cross-entropy {entropy:.4f}, exponential "
            f"{perplexity(entropy):.4f}; the probabilities multiplied out give {geometric:.4f}.",
            f"A model that gives every word the same has perplexity {perplexity(uniform):.4f}: the number of words.",
        ],
    )  # fmt: skip
