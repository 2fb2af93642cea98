"""State: what a method remembers of the keys and values so far. A value, never hidden in a module.

    linear methods   sums = sum_j phi(k_j) [v_j, 1], with the normaliser in the last column: a fixed size
    Exact            the keys and values themselves: grows with the length
    Multipole        the same, without those that were hidden, and the moments of their blocks

A sequence cut anywhere, and resumed from its state, gives what the whole gives.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass
class Claim:
    """On the room that a state's tensors have: the state with this length wrote last, and alone may go on there."""

    length: int


@dataclass(frozen=True)
class State:
    """Returned by `attention(..., return_state=True)` and taken by `attention(..., state=...)`.

    method: what made it. A state serves that method only.
    length: the number of keys seen.
    sums: (..., heads, r, e + 1), float32 or wider.
    poison: (..., heads), 0, or NaN once a non-finite key or value was seen.
    log_scale: what the sums must be multiplied by exp() of: (..., heads, 1), or (..., heads, r) for `Separable`.
    segment: (..., heads), the segment of the last key, where segments are used.
    keys, values, keep: of `Exact`; keep marks the keys that padding does not hide. (..., heads, length, width)
    filled, moments, claim: of `Multipole`, whose keys and values have room for more than are there.

    >>> from subquad import attention
    >>> q = k = v = torch.ones(2, 1, 5, 4)
    >>> out, state = attention(q, k, v, is_causal=True, method="taylor", return_state=True)
    >>> state
    State(Taylor(degree=2, basis='symmetric', key_shift=None), length=5, bytes=608)
    >>> out, state = attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], is_causal=True, method="taylor",
    ...                        state=state, return_state=True)
    >>> state.length, state[torch.tensor([1, 1, 0])].sums.shape
    (6, torch.Size([3, 1, 15, 5]))
    """

    method: object
    length: int
    sums: Tensor | None = None
    poison: Tensor | None = None
    log_scale: Tensor | None = None
    segment: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    keep: Tensor | None = None
    filled: Tensor | None = None
    moments: tuple[Tensor, ...] = ()
    claim: Claim | None = field(default=None, compare=False)
    value_width: int | None = None  # of Multipole, whose values have rows of whole vectors

    def to(self, device: torch.device | str) -> "State":
        """The same state on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def detach(self) -> "State":
        """The same state without its history: gradients stop here (truncated backpropagation)."""
        return self._map(Tensor.detach)

    def __getitem__(self, index: Tensor | slice) -> "State":
        """Select or reorder along the first dimension, the batch if there is one; beams may repeat an index."""
        return self._map(lambda tensor: tensor[index])

    @property
    def nbytes(self) -> int:
        """The bytes that its tensors take."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def __repr__(self) -> str:
        return f"State({self.method}, length={self.length}, bytes={self.nbytes})"

    def _tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in _TENSORS}
        named |= {f"moments.{i}": tensor for i, tensor in enumerate(self.moments)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _map(self, function: Callable[[Tensor], Tensor]) -> "State":
        changed = {name: function(tensor) for name, tensor in self._tensors().items()}
        return _made(self.method, self.length, self.value_width, changed)


_TENSORS = ("sums", "poison", "log_scale", "segment", "keys", "values", "keep", "filled")


def _made(method: object, length: int, value_width: int | None, tensors: dict[str, Tensor]) -> State:
    """From tensors by name; it has no claim on their room, which others may share."""
    moments = tuple(tensor for name, tensor in tensors.items() if name.startswith("moments."))
    named: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in _TENSORS}
    return State(method, length, **named, moments=moments, value_width=value_width)


# Known to torch as a container of tensors, so that functions under torch.func can take and return it.
pytree.register_pytree_node(
    State,
    lambda state: (list(state._tensors().values()), (state.method, state.length, state.value_width, *state._tensors())),
    lambda tensors, context: _made(context[0], context[1], context[2], dict(zip(context[3:], tensors, strict=True))),
    serialized_type_name="subquad.State",
)
