"""Decoding with Hybrid: a step of its window, and a step of its far method for the key that leaves the window.

out = out_near + s (out_far - out_near),    s = g z / (exp(l) + g z) = sigmoid(log g z - l)
"""

from dataclasses import replace

import torch
from torch import Tensor

from subquad._calls.state import State
from subquad._engines.features import steps as feature_steps
from subquad._engines.features.steps import FeatureSteps, MappedSteps
from subquad._engines.sparse import steps as window_steps
from subquad._engines.sparse.steps import WindowSteps
from subquad.methods.hybrid import Hybrid
from subquad.methods.method import feature_method


class HybridSteps:
    """The steps that follow a state whose window is full; `prepared` makes them."""

    def __init__(self, method: Hybrid, near: WindowSteps, far: FeatureSteps | MappedSteps) -> None:
        self._method, self._near, self._far = method, near, far
        self._log_factor: Tensor | None = None  # (b, g)
        if method.log_factor is not None:
            rows, group = far.normalizer.shape
            by_group = method.log_factor.detach().reshape(-1, group)
            self._log_factor = by_group.repeat(rows // len(by_group), 1)

    @property
    def state(self) -> State:
        """The state after the last token; the sums are a copy, and later steps write behind its keys."""
        return self._joined(self._far.state)

    def release(self) -> State:
        """Return the state after the last token."""
        return self._joined(self._far.release())

    def _joined(self, far: State) -> State:
        assert far.sums is not None
        sums = torch.cat([far.sums, far.sums[..., -1:]], -1)  # Normalizers are a value of the far method too.
        return replace(self._near.state, method=self._method, sums=sums, poison=far.poison)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Return (..., heads, 1, e) for the next token; None if the buffers of the window are full, or taken."""
        leaving = self._near.oldest
        near = self._near(query, key, value)
        if near is None:
            return None
        far = self._far(query, leaving[0].reshape(key.shape), leaving[1].reshape(value.shape))
        assert far is not None  # It has no buffers that could be full.
        far_level = self._far.normalizer.log()
        far_level = far_level if self._log_factor is None else far_level + self._log_factor
        share = (far_level - self._near.level[..., 0]).sigmoid_().to(near.dtype)
        return torch.lerp(near, far, share.reshape(*query.shape[:-1], 1))


def prepared(state: State, scale: float | None, query: Tensor, key: Tensor, value: Tensor) -> HybridSteps | None:
    """Return the steps for tokens like this one; None if the general path has to serve them."""
    method = state.method
    assert isinstance(method, Hybrid)
    # Until then keys leave that are sinks, or none do.
    is_full = state.length >= method.window.reach + method.window.sinks
    far_method = feature_method(method.far)
    is_simple = method.positive and not far_method.has_log_scale and not far_method.is_aligned
    if state.sums is None or state.keep is not None or not is_full or not is_simple:
        return None
    sums = State(method.far, state.length, state.scale, state.sums[..., :-1], state.poison, state.log_scale)
    far = feature_steps.prepared(sums, scale, query, key, value)
    near = None
    if far is not None:
        window = replace(state, method=method.window, sums=None, poison=None, log_scale=None)
        near = window_steps.prepared(window, scale, query, key, value)
    return None if far is None or near is None else HybridSteps(method, near, far)
