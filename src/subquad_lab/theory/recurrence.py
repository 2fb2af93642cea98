"""Memory and gradients of recurrent networks.

W is the recurrent matrix, s the activation with |s'| <= gamma, and T the number of steps. |.| of a matrix is its
largest singular value.
"""

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad_lab.data.text import Corpus
from subquad_lab.experiments.language import EVALUATION_STREAMS, Config, Language
from subquad_lab.figures.plots import axes_of, svg
from subquad_lab.models.language import SigmoidRNN
from subquad_lab.models.recurrences import Activation, after_activation, alternating_sum, before_activation
from subquad_lab.theory.claims import Finding, Setting, at_least, at_most, claim, equal, small
from subquad_lab.theory.inputs import ROUNDING, distance, normal

ACTIVATIONS: dict[str, Activation] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "sin": torch.sin,
}


def scaled(matrices: Tensor, size: float | Tensor) -> Tensor:
    """Scale matrices to this largest singular value."""
    found: Tensor = matrices * (size / torch.linalg.matrix_norm(matrices, 2))[..., None, None]
    return found


# --- 11 -----------------------------------------------------------------------------------------------------------


def one_from_the_other(h: Tensor, s: Activation) -> Tensor:
    """Return the states after the activation from those before it."""
    return s(h)


@claim(
    11, "Applying the activation before the matrix or after the sum gives the same recurrence, for any activation.",
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
        apart[name] = distance(g, one_from_the_other(h, s))
    return Finding(
        [at_most(f"{name}: relative difference of the two forms over {steps} steps", error, ROUNDING)
         for name, error in apart.items()],
        [
            "Let g_t = s(h_t) and g_0 = s(h_0). The first form then reads h_t = W g_{t-1} + U x_t + b.",
            "Applying s to both sides gives g_t = s(W g_{t-1} + U x_t + b), the second form.",
            "This holds for any s. The states differ by s; the sequence of outputs is the same.",
            f"Over {steps} steps with {', '.join(apart)}, the two forms agree to {small(max(apart.values()))}.",
        ],
    )  # fmt: skip


# --- 12 and 13 ----------------------------------------------------------------------------------------------------

BOUNDED: dict[str, tuple[Activation, float]] = {"tanh": (torch.tanh, 1.0), "sigmoid": (torch.sigmoid, 0.25)}  # gamma


def step_jacobian(w: Tensor, slope: Tensor) -> Tensor:
    """Return dh_t / dh_{t-1} (..., n, n) from s'(h_{t-1}) (..., n)."""
    return w * slope[..., None, :]


def vanishing_bound(delta: float, steps: int) -> float:
    return delta**steps


def largest_eigenvalue(delta: float, gamma: float) -> float:
    """Return the largest eigenvalue of W^T W for which the gradient is at most delta^T."""
    return (delta / gamma) ** 2


def slopes(s: Activation, h: Tensor) -> Tensor:
    h = h.detach().requires_grad_()
    return torch.autograd.grad(s(h).sum(), h)[0]


def jacobians(w: Tensor, b: Tensor, s: Activation, start: Tensor, inputs: Tensor) -> Tensor:
    """Return dh_t / dh_0 (T, networks, n, n) by the chain rule, for h_t = W s(h_{t-1}) + x_t + b.

    Args:
        w: (networks, n, n).
        b: (networks, n).
        s: Activation.
        start: (networks, n).
        inputs: (T, networks, n).
    """
    same = torch.eye(w.shape[-1], dtype=w.dtype)
    run = torch.vmap(lambda w, b, h, x: before_activation(w, same, b, s, h, x), in_dims=(0, 0, 0, 1), out_dims=1)
    before = torch.cat([start[None], run(w, b, start, inputs)[:-1]])
    whole, found = same, []
    for slope in slopes(s, before):
        whole = step_jacobian(w, slope) @ whole
        found.append(whole)
    return torch.stack(found)


def gradients(w: Tensor, s: Activation, seed: int, steps: int) -> Tensor:
    """Return |dh_t / dh_0| (T, networks) for a random start and random inputs."""
    networks, width, _ = w.shape
    start = normal(networks, width, seed=seed + 1, spread=0.3)
    inputs = normal(steps, networks, width, seed=seed + 2, spread=0.3)
    norms: Tensor = torch.linalg.matrix_norm(jacobians(w, torch.zeros_like(start), s, start, inputs), 2)
    return norms


def steepest_gradient(eigenvalue: float, s: Activation, width: int, seed: int, steps: int) -> float:
    """Return |dh_T / dh_0| for W = sqrt(eigenvalue) times an orthogonal matrix, at h = 0, where s is steepest."""
    w = math.sqrt(eigenvalue) * torch.linalg.qr(normal(1, width, width, seed=seed))[0]
    start = torch.zeros(1, width, dtype=torch.float64)
    b = -(w @ s(start)[..., None])[..., 0]
    whole = jacobians(w, b, s, start, torch.zeros(steps, 1, width, dtype=torch.float64))
    return float(torch.linalg.matrix_norm(whole[-1], 2))


def apart_from_autograd(s: Activation, width: int, seed: int, steps: int) -> float:
    """Compare the chain rule through all steps of one network with autograd through the lab's cell."""
    w, b = scaled(normal(1, width, width, seed=seed), 1.0), normal(1, width, seed=seed + 1, spread=0.3)
    start, inputs = normal(1, width, seed=seed + 2), normal(steps, 1, width, seed=seed + 3)
    same = torch.eye(width, dtype=torch.float64)
    by_autograd = torch.autograd.functional.jacobian(
        lambda h: before_activation(w[0], same, b[0], s, h, inputs[:, 0])[-1], start[0]
    )
    return distance(jacobians(w, b, s, start, inputs)[-1, 0], by_autograd)


NETWORKS = 1000  # half of them for each activation


@claim(
    12, "The Jacobian of one step is W diag(s'(h)); if the largest eigenvalue of W^T W is at most delta^2 / gamma^2, "
        "the "
    "norm of the gradient through T steps is at most delta^T, so it vanishes for delta < 1.",
    r"\frac{\partial h_t}{\partial h_{t-1}} = W \,\mathrm{diag}(s'(h_{t-1})), \quad \lambda_1(W^T W) \le "
    r"\frac{\delta^2}{\gamma^2} \Rightarrow \left|\frac{\partial h_T}{\partial h_0}\right| \le \delta^T",
)  # fmt: skip
def vanishing(setting: Setting) -> Finding:
    width, steps, seed = setting.of(4, 6, 10), 25, setting.seed
    deltas = torch.linspace(0.5, 0.99, NETWORKS // len(BOUNDED), dtype=torch.float64)
    bounds = torch.tensor([[vanishing_bound(float(d), t) for d in deltas] for t in range(1, steps + 1)])
    violations, apart, steepest = 0, 0.0, {}
    for name, (s, gamma) in BOUNDED.items():
        sizes = torch.tensor([math.sqrt(largest_eigenvalue(float(d), gamma)) for d in deltas], dtype=torch.float64)
        norms = gradients(scaled(normal(len(deltas), width, width, seed=seed), sizes), s, seed, steps)
        violations += int((norms > bounds * (1 + ROUNDING)).sum())
        apart = max(apart, apart_from_autograd(s, width, seed, steps))
        steepest[name] = steepest_gradient(largest_eigenvalue(0.9, gamma), s, width, seed, steps)
    return Finding(
        [
            at_most(f"product of W diag(s'), relative deviation from autograd, T = {steps}", apart, ROUNDING),
            equal(f"violations of the bound delta^t in {NETWORKS:,} networks, t = 1 to {steps}", violations, 0),
            *(equal(f"gradient of {name} at its steepest point, |W| = 0.9 / gamma", found, vanishing_bound(0.9, steps))
              for name, found in steepest.items()),
        ],
        [
            "|W diag(s')| <= |W| gamma, and |W|^2 is the largest eigenvalue of W^T W. Each step contributes a factor "
            f"of at most delta, and T steps at most delta^T. Autograd through {steps} steps confirms the product to "
            f"{small(apart)}.",
            f"{NETWORKS:,} random networks of width {width}, half with tanh (gamma = 1) and half with sigmoid (gamma = "
            f"1/4), delta = 0.5 to 0.99: {violations} violations.",
            "The bound is attained if W stretches all directions equally and the state stays at h = 0, where s is "
            "steepest.",
        ],
        lambda: gradient_picture(setting),
    )  # fmt: skip


def gradient_picture(setting: Setting) -> bytes:
    """Plot gradient norms over time with their bound, for several norms of W."""
    figure, (axes,) = axes_of(1)
    steps, width = 40, 12
    for color, size in enumerate((0.6, 0.9, 1.0, 1.3, 2.0)):
        w = scaled(normal(1, width, width, seed=setting.seed), torch.tensor([size], dtype=torch.float64))
        norms = gradients(w, torch.tanh, setting.seed, steps)[:, 0]
        axes.semilogy(range(1, steps + 1), norms, color=f"C{color}", label=f"|W| = {size}")
        axes.semilogy(range(1, steps + 1), [size**t for t in range(1, steps + 1)], ":", color=f"C{color}")
    axes.set(xlabel="steps T", ylabel="|dh_T / dh_0| (dotted: bound)", ylim=(1e-12, 1e12))
    axes.legend(fontsize="small")
    return svg(figure)


def explosion_threshold(gamma: float) -> float:
    """Return the largest eigenvalue of W^T W up to which no gradient explodes."""
    return 1 / gamma**2


@claim(
    13, "A gradient can explode only if the largest eigenvalue of W^T W is above 1 / gamma^2. This is necessary but "
        "not "
    "sufficient: the gradient of a saturated unit vanishes anyway.",
    r"\left|\frac{\partial h_T}{\partial h_0}\right| \to \infty \;\Rightarrow\; \lambda_1(W^T W) > \frac{1}{\gamma^2}",
    "A largest eigenvalue above the threshold is sufficient; or the threshold is 1 / gamma.",
)  # fmt: skip
def exploding(setting: Setting) -> Finding:
    width, steps, seed = setting.of(4, 6, 8), setting.of(20, 40, 60), setting.seed
    sigmoid, gamma = BOUNDED["sigmoid"]
    threshold = explosion_threshold(gamma)
    below, above = (steepest_gradient(part * threshold, sigmoid, width, seed, steps) for part in (0.99, 1.01))
    matrices = scaled(normal(200, width, width, seed=seed), math.sqrt(0.99 * threshold))
    below_all = float(gradients(matrices, sigmoid, seed, steps)[-1].max())
    saturated = unit_gradient(2.25, 3.0, torch.tanh, steps)
    doubled = unit_gradient(0.36, 0.0, lambda h: 2 * h, steps)  # gamma = 2
    return Finding(
        [
            at_most(f"gradient of sigmoid at its steepest point, lambda_1 = 0.99 / gamma^2, T = {steps}", below, 1.0),
            at_least("the same, lambda_1 = 1.01 / gamma^2", above, 1.0),
            at_most("largest gradient of 200 networks with lambda_1 = 0.99 / gamma^2", below_all, 1.0),
            at_least("lambda_1 of the saturated unit", 2.25, explosion_threshold(1.0)),
            at_most("gradient of the saturated unit", saturated, 1e-6),
            at_least("the same, if lambda_1 above the threshold were sufficient", saturated, 1.0, mistake=True),
            at_most("gradient for s(h) = 2 h, lambda_1 = 0.36, if 1 / gamma = 0.5 were the threshold", doubled, 1.0,
                    mistake=True),
        ],
        [
            "If lambda_1 <= 1 / gamma^2, every factor is at most 1, and so is every product of them. An exploding "
            "gradient therefore needs lambda_1 > 1 / gamma^2.",
            f"The sigmoid has gamma = 1/4, so its threshold is {threshold:.0f}. At its steepest point, the gradient "
            f"after {steps} steps is {below:.3f} at 0.99 times the threshold and {above:.3f} at 1.01 times.",
            "The converse is false: gamma is the largest slope of s, but a unit may operate where s is flat.",
            f"For tanh with lambda_1 = 2.25 and a bias of 3, s' is nearly 0 and the gradient is {saturated:.1g}.",
            f"1 / gamma is not the threshold: s(h) = 2 h has gamma = 2, and with lambda_1 = 0.36 < 0.5 its gradient is "
            f"1.2^{steps} = {doubled:.3g}.",
        ],
    )  # fmt: skip


def unit_gradient(eigenvalue: float, bias: float, s: Activation, steps: int) -> float:
    """Return |dh_T / dh_0| of one unit, by autograd through the lab's cell."""
    start = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    w, nothing = torch.tensor([[math.sqrt(eigenvalue)]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    states = before_activation(w, nothing, nothing[0] + bias, s, start, nothing.expand(steps, 1))
    return float(torch.autograd.grad(states[-1, 0], start)[0].abs())


# --- 14 to 16 -----------------------------------------------------------------------------------------------------


def even_wins(inputs: Tensor) -> Tensor:
    """Return 1 if the inputs at even positions have the larger sum, 0 if those at odd positions do, 0.5 for a tie."""
    return (torch.sign(inputs[..., 1::2].sum(-1) - inputs[..., 0::2].sum(-1)) + 1) / 2


@claim(
    14, "With h_t = x_t - h_{t-1}, h_0 = 0 and even T, y = sigmoid(1000 h_T) is 1 if the inputs at even positions "
        "have a "
    "larger sum than those at odd positions, 0 if smaller, and 0.5 for a tie.",
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
            equal(f"errors on all {len(bits):,} sequences of {length} bits and 2,000 sequences of integers", wrong, 0),
            equal("ties among the bits", ties, math.comb(length, length // 2)),
        ],
        [
            "h_1 = x_1, h_2 = x_2 - x_1, h_3 = x_3 - x_2 + x_1: each step flips all signs and adds one input.",
            "After an even number of steps, even positions have a positive sign and odd positions a negative sign.",
            "In floating point, sigmoid(1000 h) is 1 for h >= 1 and 0 for h <= -1; at h = 0 it is 0.5.",
            f"All {len(bits):,} sequences of {length} bits ({ties} of them ties) and 2,000 sequences of integers: "
            f"{wrong} errors.",
        ],
    )  # fmt: skip


def language_model_shapes(words: int, embedding: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes as in the equations; torch's linear layers store I and H transposed."""
    return {"L": (words, embedding), "H": (width, width), "I": (embedding, width), "U": (width, words), "b1": (width,),
            "b2": (words,)}  # fmt: skip


def one_step_gradients(
    e: Tensor, before: Tensor, h: Tensor, y: Tensor, wanted: Tensor, parts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of the cross-entropy of one step, derived by hand; all vectors are rows (1, n)."""
    d1 = y - wanted
    d2 = (d1 @ parts["U"].mT) * h * (1 - h)
    return {"U": h.mT @ d1, "b2": d1[0], "I": e.mT @ d2, "H": before.mT @ d2, "b1": d2[0], "e": d2 @ parts["I"].mT,
            "h'": d2 @ parts["H"].mT}  # fmt: skip


@claim(
    15, "The shapes of a recurrent language model and its gradients through one step match their derivation by hand.",
    r"h = \sigma(h' H + e I + b_1), \; \hat y = \mathrm{softmax}(h U + b_2); \quad \delta_1 = \hat y - y, \; "
    r"\delta_2 = (\delta_1 U^T) \odot h \odot (1 - h)",
)  # fmt: skip
def language_model(setting: Setting) -> Finding:
    words, embedding, width = setting.of(7, 11, 19), setting.of(3, 4, 6), setting.of(4, 5, 8)
    torch.manual_seed(setting.seed)
    model = SigmoidRNN(words, embedding, width, dropout=0.0, tied=False).double()
    before = normal(1, width, seed=setting.seed + 1).sigmoid().requires_grad_()
    word, target = torch.tensor([[2]]), torch.tensor([5])
    logits, h = model(word, before)
    assert model.embedding.outward is not None
    parts = {"L": model.embedding.inward, "H": model.recurrent.weight.mT, "I": model.inward.weight.mT,
             "U": model.embedding.outward.mT, "b1": model.inward.bias, "b2": model.embedding.bias}  # fmt: skip
    own = [model.embedding.outward, model.embedding.bias, model.inward.weight, model.recurrent.weight,
           model.inward.bias, model.embedding.inward, before]  # fmt: skip
    du, db2, di, dh, db1, dl, dbefore = torch.autograd.grad(F.cross_entropy(logits[0], target), own)
    by_autograd = {"U": du.mT, "b2": db2, "I": di.mT, "H": dh.mT, "b1": db1, "e": dl[2:3], "h'": dbefore}
    wanted = F.one_hot(target, words).double()
    by_hand = one_step_gradients(model.embedding.inward[2:3], before, h, logits[0].softmax(-1), wanted, parts)
    apart = {of: distance(by_hand[of].detach(), found) for of, found in by_autograd.items()}
    places = parts | {"e": model.embedding.inward[2:3], "h'": before}
    loss = lambda: F.cross_entropy(model(word, before)[0][0], target)
    measured = {of: distance(finite_differences(loss, places[of].detach()), by_autograd[of]) for of in by_autograd}
    claimed, found = language_model_shapes(words, embedding, width), {name: tuple(p.shape) for name, p in parts.items()}
    return Finding(
        [
            equal("matrices and vectors whose shape differs from the claim", len(claimed.items() ^ found.items()), 0),
            *(at_most(f"d{of} by hand, relative deviation from "
                      "autograd", error, ROUNDING) for of, error in apart.items()),
            *(at_most(f"d{of} by autograd, relative deviation from finite differences", error, 1e-6)
              for of, error in measured.items()),
        ],
        [
            "The gradient of the cross-entropy with respect to the inputs of the softmax is d1 = y^ - y.",
            "h U + b2 gives dU = h^T d1, db2 = d1, and the gradient d1 U^T with respect to h.",
            "The slope of the sigmoid is h (1 - h), so the gradient with respect to h' H + e I + b1 is d2 = (d1 U^T) h "
            "(1 - h).",
            "Hence dI = e^T d2, dH = h'^T d2, db1 = d2, de = d2 I^T, dh' = d2 H^T.",
            f"Shapes for {words} words, embedding {embedding}, width {width}: "
            + ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in claimed.items()) + ".",
            f"The gradients by hand deviate from autograd by at most {small(max(apart.values()))}, and those by "
            "autograd from finite differences by at most 1e-06.",
        ],
    )  # fmt: skip


@torch.no_grad()
def finite_differences(loss: Callable[[], Tensor], x: Tensor, step: float = 1e-5) -> Tensor:
    """Return the gradient of a loss with respect to x, whose entries are changed in place and restored."""
    found = torch.zeros_like(x)
    for place in product(*map(range, x.shape)):
        kept = x[place].clone()
        x[place] = kept + step
        above = loss()
        x[place] = kept - step
        found[place] = (above - loss()) / (2 * step)
        x[place] = kept
    return found


def perplexity(cross_entropy: float) -> float:
    return math.exp(cross_entropy)


@claim(
    16, "Perplexity, the inverse geometric mean of the word probabilities, is the exponential of the cross-entropy.",
    r"\left(\prod_t p_t\right)^{-1/T} = \exp\left(-\frac{1}{T} \sum_t \log p_t\right)",
)  # fmt: skip
def perplexity_is_exponential(setting: Setting) -> Finding:
    words, length = setting.of(5, 9, 17), EVALUATION_STREAMS * setting.of(2, 3, 4)
    text = torch.randint(words, (length + 1,), generator=torch.Generator().manual_seed(setting.seed))
    torch.manual_seed(setting.seed)
    config = Config(model="rnn", embedding=4, width=6, batch=1, context=4, dropout=0.0, tied=False)
    task = Language(config, Corpus("drawn", "", tuple(map(str, range(words))), text, text, text))
    task.model.double()
    found = task.evaluate("test", lambda: None)
    with torch.no_grad():  # The lab splits a text into streams for evaluation.
        chances = (
            task.model(text[:-1].view(EVALUATION_STREAMS, -1))[0].softmax(-1).flatten(0, 1).gather(1, text[1:, None])
        )
        for parameter in task.model.parameters():
            parameter.zero_()
    geometric, entropy = float(chances.prod()) ** (-1 / length), -float(chances.log().mean())
    ignorant = task.evaluate("test", lambda: None)["perplexity"]
    return Finding(
        [
            equal("the lab's perplexity", found["perplexity"], perplexity(entropy)),
            equal("inverse geometric mean of the probabilities", geometric, perplexity(entropy)),
            equal("the lab's cross-entropy", found["cross_entropy"], entropy),
            equal(f"the lab's perplexity of a uniform model of {words} words", ignorant, words),
        ],
        [
            "The logarithm of the geometric mean of p_1 ... p_T is the mean of log p_t; the cross-entropy is the "
            "negative of that mean.",
            f"For a model of {words} words on a text of {length} words, the cross-entropy is {entropy:.4f} and its "
            f"exponential {perplexity(entropy):.4f}; the product of the probabilities gives {geometric:.4f}.",
            f"The evaluation of language models in the lab returns {found['perplexity']:.4f}.",
            f"A uniform model has perplexity {ignorant:.4f}, the number of words.",
        ],
    )  # fmt: skip
