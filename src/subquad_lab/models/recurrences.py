"""Recurrences in a few lines each.

before    h_t = W s(h_{t-1}) + U x_t + b      the state is what goes into the activation
after     g_t = s(W g_{t-1} + U x_t + b)      the state is what comes out of it
alternating sum    h_t = x_t - h_{t-1},  y = sigmoid(1000 h_T)
"""

from collections.abc import Callable

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def before_activation(w: Tensor, u: Tensor, b: Tensor, s: Activation, start: Tensor, inputs: Tensor) -> Tensor:
    """States (T, n) from inputs (T, m): h_1 ... h_T."""
    h, states = start, []
    for x in inputs:
        h = w @ s(h) + u @ x + b
        states.append(h)
    return torch.stack(states)


def after_activation(w: Tensor, u: Tensor, b: Tensor, s: Activation, start: Tensor, inputs: Tensor) -> Tensor:
    """States (T, n) from inputs (T, m): g_1 ... g_T."""
    g, states = start, []
    for x in inputs:
        g = s(w @ g + u @ x + b)
        states.append(g)
    return torch.stack(states)


def alternating_sum(inputs: Tensor) -> Tensor:
    """y (...) of inputs (..., T).

    >>> alternating_sum(torch.tensor([[1.0, 5.0], [5.0, 1.0], [2.0, 2.0]]))
    tensor([1.0000, 0.0000, 0.5000])
    """
    h = torch.zeros_like(inputs[..., 0])
    for x in inputs.unbind(-1):
        h = x - h
    return torch.sigmoid(1000 * h)
