"""Equivalences and differences of optimizers, checked with the lab's own optimizers on a quadratic loss.

r is the learning rate, g the gradient, v the velocity or the exponential moving average.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from subquad_lab.figures.plots import axes_of, svg
from subquad_lab.theory.claims import Finding, Setting, at_least, at_most, claim, equal, small
from subquad_lab.theory.inputs import ROUNDING, distance, normal
from subquad_lab.training.optimizers import SGD, Adam

Make = Callable[[list[nn.Parameter]], Optimizer]


def walk(make: Make, setting: Setting, steps: int, penalty: float = 0.0) -> Tensor:
    """Return the path (steps + 1, n) of an optimizer on a quadratic loss, with the same gradient noise each time.

    The loss is x.V x / 2 + noise.x + penalty |x|^2; autograd computes the gradient.
    """
    size = setting.of(2, 4, 8)
    valley = normal(size, size, seed=setting.seed)
    valley = valley @ valley.mT / size + torch.eye(size, dtype=torch.float64) * 0.1
    x = nn.Parameter(normal(size, seed=setting.seed + 1))
    optimizer, places = make([x]), [x.detach().clone()]
    for noise in normal(steps, size, seed=setting.seed + 2, spread=0.3):
        optimizer.zero_grad()
        (x @ valley @ x / 2 + noise @ x + penalty * x.square().sum()).backward()
        optimizer.step()
        places.append(x.detach().clone())
    return torch.stack(places)


# --- 17 and 18: momentum and moving averages ---------------------------------------------------------------------


def rate_of_momentum(rate: float, share: float) -> float:
    """Return the learning rate of momentum that is equivalent to an average with this rate."""
    return rate * (1 - share)


@claim(
    17, "Momentum and an exponential moving average of the gradients take the same steps if the learning rate of "
        "momentum "
    "is smaller by the factor 1 - b.",
    r"v = a v + \epsilon g \;\equiv\; v = b v + (1 - b) g \text{ with step } \delta, \quad a = b, \; "
    r"\epsilon = \delta (1 - b)",
    "They are the same at the same learning rate.",
)  # fmt: skip
def momentum_is_average(setting: Setting) -> Finding:
    share, rate, steps = 0.9, 0.2, setting.of(50, 100, 200)
    averaged = walk(lambda p: SGD(p, rate, share, "average"), setting, steps)
    momentum = walk(lambda p: SGD(p, rate_of_momentum(rate, share), share), setting, steps)
    same_rate = walk(lambda p: SGD(p, rate, share), setting, steps)
    apart, apart_at_same_rate = distance(momentum, averaged), distance(same_rate, averaged)
    return Finding(
        [
            at_most(f"relative difference of the paths over {steps} steps", apart, ROUNDING),
            at_most("the same at the same learning rate", apart_at_same_rate, 0.01, mistake=True),
        ],
        [
            "Momentum computes v = e (g_t + a g_{t-1} + a^2 g_{t-2} + ...) and steps by v.",
            "The average computes v = (1 - b) (g_t + b g_{t-1} + ...) and steps by d v: the same sum, times d (1 - b).",
            f"With a = b = {share}, d = {rate} and e = {rate_of_momentum(rate, share):.3g}, the paths of {steps} noisy "
            f"steps agree to {small(apart)}.",
            f"At the same learning rate, the steps of momentum are {1 / (1 - share):.0f} times as long, and the paths "
            f"differ by {apart_at_same_rate:.2g}.",
        ],
        lambda: momentum_picture(setting),
    )  # fmt: skip


def momentum_picture(setting: Setting) -> bytes:
    figure, (axes,) = axes_of(1)
    kinds: dict[str, Make] = {
        "average, rate 0.2": lambda p: SGD(p, 0.2, 0.9, "average"),
        "average with bias correction, rate 0.2": lambda p: SGD(p, 0.2, 0.9, "corrected"),
        "momentum, rate 0.02": lambda p: SGD(p, 0.02, 0.9),
        "momentum, rate 0.2": lambda p: SGD(p, 0.2, 0.9),
    }
    for (name, make), style in zip(kinds.items(), ("-", "-", "--", "-"), strict=True):
        axes.plot(walk(make, setting, 80).norm(dim=-1), style, label=name)
    axes.set(xlabel="step", ylabel="distance from the minimum")
    axes.legend(fontsize="small")
    return svg(figure)


def held(share: float, steps: int) -> float:
    """Return the expected fraction of the mean gradient in an average after this many steps."""
    return 1 - share**steps


@claim(
    18, "An exponential moving average that starts at 0 is biased: its mean is 1 - b^t times that of the gradient. "
        "Dividing "
    "by 1 - b^t removes the bias.",
    r"v_t = (1 - b) \sum_{i \le t} b^{t-i} g_i, \quad \mathbb{E}[v_t] = (1 - b^t) \, \mathbb{E}[g]",
    "The average is unbiased without correction.",
)  # fmt: skip
def bias_of_average(setting: Setting) -> Finding:
    share, steps, walks, mean = 0.9, setting.of(4, 6, 12), 20_000, 2.0
    drawn = mean + normal(steps, walks, seed=setting.seed)
    x = nn.Parameter(torch.zeros(walks, dtype=torch.float64))
    plain = SGD([x], 1.0, share, "average")
    y = nn.Parameter(torch.zeros(walks, dtype=torch.float64))
    corrected = SGD([y], 1.0, share, "corrected")
    for gradient in drawn:
        x.grad, y.grad, before = gradient.clone(), gradient.clone(), y.detach().clone()
        plain.step()
        corrected.step()
    average, step = plain.state[x]["velocity"], before - y.detach()
    written_out = torch.stack([(1 - share) * share ** (steps - i) * drawn[i - 1] for i in range(1, steps + 1)]).sum(0)
    error = float(average.std()) / walks**0.5
    error_corrected = float(step.std()) / walks**0.5
    return Finding(
        [
            at_most("v_t, relative deviation from the explicit sum", distance(average, written_out), ROUNDING),
            at_most(f"mean of v_t, t = {steps}, deviation from (1 - b^t) E[g] in standard errors",
                    abs(float(average.mean()) - held(share, steps) * mean) / error, 4.5),
            at_most("mean of the corrected step, deviation from E[g] in standard errors",
                    abs(float(step.mean()) - mean) / error_corrected, 4.5),
            at_most("mean of v_t, deviation from E[g] in standard "
                    "errors", abs(float(average.mean()) - mean) / error, 4.5,
                    mistake=True),
        ],
        [
            "v_0 = 0. Each step multiplies v by b and adds (1 - b) g, which gives the sum above.",
            "Its weights, (1 - b) b^(t-i), sum to 1 - b^t; the remaining weight b^t belongs to v_0, which is 0.",
            f"b = {share}, t = {steps}, E[g] = {mean}: (1 - b^t) E[g] = {held(share, steps) * mean:.4f}. Over "
            f"{walks:,} samples, the mean of v_t is {float(average.mean()):.4f}.",
            f"Divided by 1 - b^t, the mean step is {float(step.mean()):.4f}.",
        ],
    )  # fmt: skip


# --- 19 and 20: decay ---------------------------------------------------------------------------------------------


def decay_of_penalty(rate: float, penalty: float) -> float:
    """Return the weight decay per step that is equivalent to a penalty gamma |x|^2."""
    return 2 * rate * penalty


@claim(
    19, "For SGD, shrinking each weight by the factor 1 - lambda in each step is equivalent to an L2 penalty gamma "
        "|x|^2 "
    "in the loss, with lambda = + 2 eta gamma.",
    r"x \leftarrow (1 - \lambda) x - \eta g \;\equiv\; x \leftarrow x - \eta (g + 2 \gamma x), \quad "
    r"\lambda = +2 \eta \gamma",
    "lambda = - 2 eta gamma; or lambda = eta gamma, without the 2.",
)  # fmt: skip
def decay_is_penalty(setting: Setting) -> Finding:
    rate, penalty, steps = 0.1, 0.25, setting.of(30, 60, 120)
    penalized = walk(lambda p: SGD(p, rate), setting, steps, penalty)

    def apart(share: float) -> float:
        """Return the difference from the path with this weight decay per step, which is lr * decay."""
        return distance(walk(lambda p: SGD(p, rate, decay=share / rate, decoupled=True), setting, steps), penalized)

    right = decay_of_penalty(rate, penalty)
    return Finding(
        [
            at_most(f"relative difference of the paths over {steps} steps", apart(right), ROUNDING),
            at_most("with lambda = - 2 eta gamma", apart(-right), 0.01, mistake=True),
            at_most("with lambda = eta gamma", apart(right / 2), 0.01, mistake=True),
        ],
        [
            "The gradient of gamma |x|^2 is 2 gamma x. A step of SGD subtracts eta (g + 2 gamma x).",
            "The result is (1 - 2 eta gamma) x - eta g, so lambda = 2 eta gamma, with a positive sign.",
            f"With eta = {rate}, gamma = {penalty}, autograd's gradient of the penalty, and lambda = {right:.3g}, the "
            f"paths of {steps} steps agree to {small(apart(right))}.",
            f"With the opposite sign they differ by {apart(-right):.2g}; without the 2, by {apart(right / 2):.2g}.",
        ],
    )  # fmt: skip


RATIO = 100.0  # between the gradients of the two weights
DECAY = 0.05


def shrunk(make: Make, steps: int, seed: int) -> Tensor:
    """Return the path (steps + 1, 2) of two weights from 1, with random gradients of mean 0 in the ratio 100 : 1."""
    x = nn.Parameter(torch.ones(2, dtype=torch.float64))
    sizes = torch.tensor([RATIO, 1.0], dtype=torch.float64)
    optimizer, places = make([x]), [x.detach().clone()]
    for noise in normal(steps, seed=seed):
        x.grad = noise * sizes
        optimizer.step()
        places.append(x.detach().clone())
    return torch.stack(places)


def without_noise(decayed: Tensor, plain: Tensor) -> Tensor:
    """Return how much the decay alone has reduced each weight, relative to its start."""
    return plain[-1] - decayed[-1]


def decoupled_share(rate: float, steps: int) -> float:
    """Return by how much decoupled decay reduces every weight, whatever its gradients, if the steps are small."""
    return 1 - (1 - rate * DECAY) ** steps


@claim(
    20, "With an L2 penalty, Adam shrinks weights with small gradients more strongly, because it divides the penalty "
        "by the "
    "root of the mean squared gradient; decoupled decay shrinks all weights at the same relative rate.",
    r"\text{L2: } \propto \frac{\lambda x}{\sqrt{s}}, \quad \text{decoupled: } \eta \lambda x",
    "L2 regularization and weight decay are equivalent for Adam, as they are for SGD.",
)  # fmt: skip
def adam_decays(setting: Setting) -> Finding:
    rate, steps = 0.002, setting.of(100, 200, 300)
    plain = shrunk(lambda p: Adam(p, rate), steps, setting.seed)
    penalized = shrunk(lambda p: Adam(p, rate, decay=DECAY), steps, setting.seed)
    decoupled = shrunk(lambda p: Adam(p, rate, decay=DECAY, decoupled=True), steps, setting.seed)
    with_penalty, with_decay = without_noise(penalized, plain), without_noise(decoupled, plain)
    expected = decoupled_share(rate, steps)
    return Finding(
        [
            at_least("L2: decay of the weight with small gradients / decay of the other",
                     float(with_penalty[1] / with_penalty[0]), RATIO / 4),
            equal("decoupled: the same ratio", float(with_decay[1] / with_decay[0]), 1, within=0.1),
            equal("decoupled: decay of the weight", float(with_decay[1]), expected, within=0.15),
            equal("L2: decay of the weight with large gradients, compared to decoupled decay",
                  float(with_penalty[0]), expected, within=0.15, mistake=True),
        ],
        [
            "Adam divides the whole gradient, including the penalty, by sqrt(s), the root of its mean square.",
            "A weight with gradients 100 times as large has a root 100 times as large, so the same penalty shrinks it "
            "100 times less. Decoupled decay is not divided.",
            f"Two weights start at 1, with gradients in the ratio {RATIO:.0f} : 1, {steps} steps and decay {DECAY}. L2 "
            f"reduces them by {float(with_penalty[0]):.2g} and {float(with_penalty[1]):.2g}: "
            f"{float(with_penalty[1] / with_penalty[0]):.0f} times as much for small gradients.",
            f"Decoupled decay reduces them by {float(with_decay[0]):.4f} and {float(with_decay[1]):.4f}; 1 - (1 - eta "
            f"lambda)^T is {expected:.4f}.",
        ],
        lambda: decay_picture(setting),
    )  # fmt: skip


def decay_picture(setting: Setting) -> bytes:
    figure, both = axes_of(2)
    steps, rate = 1000, 0.002
    plain = shrunk(lambda p: Adam(p, rate), steps, setting.seed)
    for axes, (name, decoupled) in zip(both, {"with L2": False, "with decoupled decay": True}.items(), strict=True):
        made = shrunk(partial(Adam, lr=rate, decay=0.3, decoupled=decoupled), steps, setting.seed)
        for i, what in enumerate(("large gradients", "small gradients")):
            axes.plot(made[:, i], ("-", "--")[i], color=f"C{i}", label=f"{what}, Adam {name}")
            axes.plot(plain[:, i], ":", color=f"C{i}", label=f"{what}, no decay")
        axes.set(xlabel="step", ylabel="weight", ylim=(-0.25, 1.25))
        axes.legend(fontsize="small")
    return svg(figure)
