"""Simple recurrences.

before    h_t = W s(h_{t-1}) + U x_t + b      the state is the input of the activation
after     g_t = s(W g_{t-1} + U x_t + b)      the state is the output of the activation
alternating sum    h_t = x_t - h_{t-1},  y = sigmoid(1000 h_T)
"""

from collections.abc import Callable

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def before_activation(w: Tensor, u: Tensor, b: Tensor, s: Activation, start: Tensor, inputs: Tensor) -> Tensor:
    """Return the states h_1 ... h_T, (T, n), for inputs (T, m)."""
    h, states = start, []
    for x in inputs:
        h = w @ s(h) + u @ x + b
        states.append(h)
    return torch.stack(states)


def after_activation(w: Tensor, u: Tensor, b: Tensor, s: Activation, start: Tensor, inputs: Tensor) -> Tensor:
    """Return the states g_1 ... g_T, (T, n), for inputs (T, m)."""
    g, states = start, []
    for x in inputs:
        g = s(w @ g + u @ x + b)
        states.append(g)
    return torch.stack(states)


def alternating_sum(inputs: Tensor) -> Tensor:
    """Return y (...) for inputs (..., T).

    >>> alternating_sum(torch.tensor([[1.0, 5.0], [5.0, 1.0], [2.0, 2.0]]))
    tensor([1.0000, 0.0000, 0.5000])
    """
    h = torch.zeros_like(inputs[..., 0])
    for x in inputs.unbind(-1):
        h = x - h
    return torch.sigmoid(1000 * h)
