"""Decoding: token after token from a state that is updated in place.

`attention(..., state=..., return_state=True)` computes the same with states that are values: each call writes a new
one. Here everything that does not change from token to token is prepared once, by the steps of the method's engine.
Tokens that these do not serve take the engine's general path.
"""

from math import sqrt

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.state import State, check_scale
from subquad._engines import engine_of, run
from subquad._engines.features import steps as feature_steps
from subquad._engines.features.steps import FeatureSteps, MappedSteps
from subquad._engines.hybrid import steps as hybrid_steps
from subquad._engines.hybrid.steps import HybridSteps
from subquad._engines.multipole import step as multipole_steps
from subquad._engines.multipole.step import MultipoleSteps
from subquad._engines.sparse import steps as window_steps
from subquad._engines.sparse.steps import WindowSteps

Steps = FeatureSteps | HybridSteps | MappedSteps | MultipoleSteps | WindowSteps
PREPARED = {
    "features": feature_steps.prepared, "hybrid": hybrid_steps.prepared, "multipole": multipole_steps.prepared,
    "sparse": window_steps.prepared,
}  # fmt: skip


class Decoder:
    """Continue a sequence from its state, one token per call, without gradients.

    The decoder has a copy of the state: neither the given one nor another decoder's changes.

    Args:
        state: What `attention(..., return_state=True)` returned.
        scale: As for `attention`.
        enable_gqa: As for `attention`.

    Example:
        >>> from subquad import Taylor, attention
        >>> q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
        >>> _, state = attention(
        ...     q[:, :, :8], k[:, :, :8], v[:, :, :8], is_causal=True, method=Taylor(2), return_state=True
        ... )
        >>> decoder = Decoder(state)
        >>> last = decoder(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:])  # (batch, heads, 1, width)
        >>> whole = attention(q, k, v, is_causal=True, method=Taylor(2))
        >>> torch.allclose(last, whole[:, :, 8:], atol=1e-5), decoder.state.length
        (True, 9)
    """

    def __init__(self, state: State, *, scale: float | None = None, enable_gqa: bool = False) -> None:
        if not isinstance(state, State):
            raise TypeError(
                f"state: expected the result of attention(..., return_state=True), got {type(state).__name__}"
            )
        is_recorded = any(x.requires_grad for x in state._tensors().values())
        self._state, self._scale, self._gqa = state.detach() if is_recorded else state, scale, enable_gqa
        self._steps: Steps | None = None
        self._signature: tuple[object, ...] = ()  # of the tokens for which the steps were prepared

    @property
    def state(self) -> State:
        """A copy of the state after the last token, as `attention` would have returned it."""
        return self._state if self._steps is None else self._steps.state

    @torch.no_grad()
    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return (..., heads, 1, e) for the next token.

        Args:
            query: (..., heads, 1, d).
            key: (..., key heads, 1, d).
            value: (..., key heads, 1, e).
        """
        signature = (query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device)
        if signature != self._signature or torch.is_autocast_enabled("cpu"):
            self._settle()
            self._signature, self._steps = signature, self._prepared(query, key, value)
        if self._steps is not None and (output := self._steps(query, key, value)) is not None:
            return output
        self._settle()
        self._signature = signature
        call = Call.of(query, key, value, is_causal=True, scale=self._scale, enable_gqa=self._gqa, state=self._state,
                       return_state=True)  # fmt: skip
        output, state, _ = run(self._state.method, call)
        assert state is not None
        self._state = state
        if engine_of(state.method) in ("hybrid", "multipole", "sparse"):  # The state has new room, or its first keys.
            self._steps = self._prepared(query, key, value)
        return output

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles prepare their own steps."""
        return vars(self) | {"_state": self.state, "_steps": None, "_signature": ()}

    def _settle(self) -> State:
        """Take the state from the steps, forget them, and return it."""
        if self._steps is not None:
            self._state, self._steps = self._steps.release(), None
            self._signature = ()
        return self._state

    def _prepared(self, query: Tensor, key: Tensor, value: Tensor) -> Steps | None:
        """Return the steps for tokens like this one; None if the general path has to serve them, or to raise."""
        state, given = self._state, (query, key, value)
        if torch.is_autocast_enabled("cpu") or not all(isinstance(x, Tensor) and x.dim() > 2 for x in given):
            return None
        if query.shape[-1] == 0 or (not self._gqa and query.shape[-3] != key.shape[-3]):
            return None
        prepare = PREPARED.get(engine_of(state.method))
        steps = None if prepare is None else prepare(state, self._scale, *given)
        if steps is not None:
            check_scale(state, 1 / sqrt(max(1, key.shape[-1])) if self._scale is None else self._scale)
        return steps
