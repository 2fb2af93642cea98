"""Optimizers, short enough to read. One step on the parameters x, with gradient g, learning rate r and momentum a:

    sgd          v = a v + g;             x -= r v         momentum
    average      v = a v + (1 - a) g;     x -= r v         exponential moving average of the gradients, from v = 0
    corrected    v / (1 - a^t) instead of v: after t steps the weights in the average sum to 1 - a^t only
    adam         m and s, bias-corrected averages of g and g^2;    x -= r m / (sqrt(s) + 1e-8)

torch's `dampening=a` equals `average` except in the first step, where v = g: that gradient weighs 1/(1 - a) times as
much as any other. Here all gradients weigh the same, and `corrected` compensates for the start.

Weight decay w is either an L2 penalty, g + w x instead of g, or decoupled, x *= 1 - r w before the step (sgdw, adamw).
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from subquad_lab import UsageError

Name = Literal["sgd", "sgdw", "average", "corrected", "adam", "adamw"]
Past = Literal["momentum", "average", "corrected"]


def make_optimizer(name: Name, parameters: ParamsT, lr: float, momentum: float = 0.0, decay: float = 0.0) -> Optimizer:
    """Return the optimizer with this name.

    >>> weights = torch.nn.Parameter(torch.ones(2))
    >>> weights.grad = torch.tensor([1.0, -1.0])
    >>> make_optimizer("sgdw", [weights], lr=0.1, decay=1.0).step()
    >>> weights.data
    tensor([0.8000, 1.0000])
    """
    if name in ("adam", "adamw"):
        return Adam(parameters, lr, decay=decay, decoupled=name == "adamw")
    past: Past = "average" if name == "average" else "corrected" if name == "corrected" else "momentum"
    return SGD(parameters, lr, momentum, past, decay, decoupled=name == "sgdw")


class SGD(Optimizer):
    """Stochastic gradient descent with momentum or with an exponential moving average."""

    def __init__(
        self, parameters: ParamsT, lr: float, momentum: float = 0.0, past: Past = "momentum",
        decay: float = 0.0, decoupled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(parameters, dict(lr=lr, momentum=momentum, past=past, decay=decay, decoupled=decoupled))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluated(closure)
        for group, x, gradient, state in _each(self):
            a = group["momentum"]
            if not state:
                state.update(step=0, velocity=torch.zeros_like(x))
            state["step"] += 1
            v = state["velocity"].mul_(a).add_(gradient, alpha=1.0 if group["past"] == "momentum" else 1 - a)
            held = 1 - a ** state["step"] if group["past"] == "corrected" else 1.0
            x.add_(v, alpha=-group["lr"] / held)
        return loss


class Adam(Optimizer):
    """Adam: the average gradient divided by the root of the average squared gradient."""

    def __init__(
        self, parameters: ParamsT, lr: float, betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8, decay: float = 0.0, decoupled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(parameters, dict(lr=lr, betas=betas, epsilon=epsilon, decay=decay, decoupled=decoupled))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluated(closure)
        for group, x, gradient, state in _each(self):
            if not state:
                state.update(step=0, mean=torch.zeros_like(x), square=torch.zeros_like(x))
            state["step"] += 1
            first, second = group["betas"]
            state["mean"].mul_(first).add_(gradient, alpha=1 - first)
            state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            mean_held, square_held = (1 - beta ** state["step"] for beta in (first, second))
            root = (state["square"] / square_held).sqrt_().add_(group["epsilon"])
            x.addcdiv_(state["mean"], root, value=-group["lr"] / mean_held)
        return loss


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    """Call the closure, which recomputes the loss and its gradients, as torch's optimizers do."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _refuse_sparse(optimizer: Optimizer) -> None:
    for x in (x for group in optimizer.param_groups for x in group["params"]):
        if x.grad is not None and x.grad.layout != torch.strided:
            raise UsageError(f"{type(optimizer).__name__}: expected dense gradients, got one of layout "
                             f"{x.grad.layout} for a parameter of shape {tuple(x.shape)}")  # fmt: skip


def _each(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], Tensor, Tensor, dict[str, Any]]]:
    """Yield group, parameter, gradient and state of each parameter that has a gradient, after weight decay."""
    _refuse_sparse(optimizer)  # before any parameter changes
    for group in optimizer.param_groups:
        for x in group["params"]:
            if x.grad is None:
                continue
            gradient = x.grad
            if group["decay"] and group["decoupled"]:
                x.mul_(1 - group["lr"] * group["decay"])
            elif group["decay"]:
                gradient = gradient.add(x, alpha=group["decay"])
            yield group, x, gradient, optimizer.state[x]
