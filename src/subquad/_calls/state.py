"""State: what a method remembers of the keys and values so far. A value, never hidden in a module.

    feature methods  sums = sum_j phi(k_j) [v_j, 1], with the normalizer in the last column: a fixed size
    Exact            the keys and values themselves: grows with the length
    Window           the last keys and values, and the first ones: a fixed size
    Multipole        the same, without hidden keys, far ones in blocks with their moments
    Hybrid           the keys of its window, and the sums of all earlier ones: a fixed size

A sequence cut anywhere, and resumed from its state, gives the result of the whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from subquad._calls.layout import Layout
from subquad._calls.sums import Sums, merge
from subquad._torch_internals import register_container
from subquad.methods import BUILT_IN, BlockSparse, Hedgehog, Hybrid, label_of

Rest = tuple[object, int, float, tuple[int, int] | None]  # what a state has besides tensors
SCALE_TOLERANCE = 1e-6  # relative: one user writes 1 / sqrt(d), another d ** -0.5


class WritePermit:
    """Write permission for a shared buffer: only the state whose length equals `length` may append in place."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.prepared: Any = None  # what the steps from here on have in common
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles belong to other tensors: what was prepared for these is left out."""
        return WritePermit, (self.length,)

    def claim(self, length: int, count: int = 1) -> bool:
        """Take the permission of the state of this length for `count` tokens; False if another call has it."""
        with self._lock:
            if self.length != length:
                return False
            self.length += count
            return True

    def give_back(self) -> None:
        """Undo a claim whose token was not appended."""
        with self._lock:
            self.length -= 1


@dataclass(frozen=True)
class State:
    """What `attention(..., return_state=True)` returns and `attention(..., state=...)` takes.

    Attributes:
        method: The method that made it, and the only one that it serves.
        length: The number of keys seen.
        scale: The factor of the logits, and the only one that it serves.
        sums: (..., heads, r, e + 1), float32 or wider; e + 2 for `Hybrid`, which reads the normalizer as a value.
        poison: (..., heads), for feature methods the number of visible keys, for `Multipole` 0; NaN once one of them or
            its value was not finite.
        log_scale: The sums are to be multiplied by its exp(): (..., heads, 1), or (..., heads, r) for `Separable`.
        segment: (..., heads), the segment of the last key, where segments are used.
        is_whole: (..., heads), for feature methods, where segments are used: whether all keys are of that segment.
        keys: (..., heads, length, width), for `Exact`; for `Window` the last of them.
        values: (..., heads, length, value width), the same.
        keep: (..., heads, length), the same: False where padding hides a key.
        filled: (..., heads), for `Multipole`: how many keys there are.
        parts: For `Multipole`, the tensors of its memory, (..., heads, ...) each; for `Window` keys, values and places
            of the first visible keys.
        widths: For `Multipole`, the widths of keys and values.
        permit: For `Multipole` and `Window`, who may write into the room for more keys.

    Example:
        >>> from subquad import attention
        >>> q = k = v = torch.ones(2, 1, 5, 4)
        >>> out, state = attention(q, k, v, is_causal=True, method="taylor", return_state=True)
        >>> state
        State(Taylor(2), length=5, bytes=608)
        >>> out, state = attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], is_causal=True, method="taylor",
        ...                        state=state, return_state=True)
        >>> state.length, state[torch.tensor([1, 1, 0])].sums.shape
        (6, torch.Size([3, 1, 15, 5]))
    """

    method: object
    length: int
    scale: float
    sums: Tensor | None = None
    poison: Tensor | None = None
    log_scale: Tensor | None = None
    segment: Tensor | None = None
    is_whole: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    keep: Tensor | None = None
    filled: Tensor | None = None
    parts: tuple[Tensor, ...] = ()
    widths: tuple[int, int] | None = None
    permit: WritePermit | None = field(default=None, compare=False)

    def to(self, device: torch.device | str) -> "State":
        """Return the same state on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def detach(self) -> "State":
        """Return the same state without its history: gradients stop here (truncated backpropagation)."""
        return self._map(Tensor.detach)

    def __getitem__(self, index: Tensor | slice) -> "State":
        """Select or reorder along the first dimension, such as the batch; beams may repeat an index."""
        return self._map(lambda tensor: tensor[index])

    @staticmethod
    def merge(before: "State", after: "State") -> "State":
        """Return the state of a whole sequence from the states of two consecutive parts.

        Associative, up to rounding. Each part's state comes from a call without a state, so parts can be summed up in
        parallel. If `after` begins with a new segment, or contains one, nothing of `before` remains.

        Args:
            before: The state of the first part.
            after: The state of the part that follows, made by the same method with the same scale.

        Raises:
            ValueError: The states do not fit, or their method keeps keys instead of sums.

        Example:
            >>> from subquad import attention
            >>> k, v = torch.randn(2, 1, 2, 10, 4).unbind()
            >>> def state_of(part):
            ...     own, values = k[..., part, :], v[..., part, :]
            ...     return attention(k[..., :0, :], own, values, method="taylor", return_state=True)[1]
            >>> whole = State.merge(state_of(slice(0, 7)), state_of(slice(7, 10)))
            >>> whole.length, torch.allclose(whole.sums, state_of(slice(0, 10)).sums, atol=1e-5)
            (10, True)
        """
        _check_mergeable(before, after)
        length = before.length + after.length
        if before.sums is None or after.sums is None:  # One of them has seen no key.
            return replace(after if before.sums is None else before, length=length)
        segments: tuple[Tensor | None, Tensor | None] = (None, None)
        is_whole = None
        if before.segment is not None and after.segment is not None:
            assert before.is_whole is not None and after.is_whole is not None
            continues = after.is_whole & (before.segment == after.segment)
            segments, is_whole = (torch.ones_like(continues), continues), continues & before.is_whole
        merged = merge(_sums(before, segments[0]), _sums(after, segments[1]))
        return replace(
            after, length=length, is_whole=is_whole, sums=merged.values, poison=merged.poison,
            log_scale=merged.log_scale,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """The size of its tensors in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def __repr__(self) -> str:
        label = getattr(self.method, "label", self.method)
        return f"State({label}, length={self.length}, bytes={self.nbytes})"

    def _tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in _TENSORS}
        named |= {f"parts.{i}": tensor for i, tensor in enumerate(self.parts)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _map(self, function: Callable[[Tensor], Tensor]) -> "State":
        changed = {name: function(tensor) for name, tensor in self._tensors().items()}
        return _made(self._rest(), changed)

    def _rest(self) -> Rest:
        return self.method, self.length, self.scale, self.widths


_TENSORS = ("sums", "poison", "log_scale", "segment", "is_whole", "keys", "values", "keep", "filled")


def _made(rest: Rest, tensors: dict[str, Tensor]) -> State:
    """Return the state with these tensors; it may not write into their room, which others may share."""
    parts = tuple(tensor for name, tensor in tensors.items() if name.startswith("parts."))
    named: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in _TENSORS}
    method, length, scale, widths = rest
    return State(method, length, scale, **named, parts=parts, widths=widths)


register_container(
    State,
    lambda state: (list(state._tensors().values()), (state._rest(), *state._tensors())),
    lambda tensors, context: _made(context[0], dict(zip(context[1:], tensors, strict=True))),
)
# Plain values, which `torch.load` may restore without running code.
torch.serialization.add_safe_globals([State, WritePermit, BlockSparse, Hedgehog, Hybrid, *BUILT_IN])


def _sums(state: State, segment: Tensor | None) -> Sums:
    assert state.sums is not None and state.poison is not None
    return Sums(state.sums, state.poison, state.log_scale, segment)


def _check_mergeable(before: State, after: State) -> None:
    """Raise ValueError unless both states hold sums that can be added."""
    for state in (before, after):
        if state.keys is not None or state.parts:
            raise ValueError(f"merge: expected states of a feature method, which hold sums, got one of {state.method}")
    check_method(before, after.method)
    check_scale(before, after.scale)
    if before.sums is None or after.sums is None:
        return
    shapes, dtypes = [tuple(x.sums.shape) for x in (before, after)], [x.sums.dtype for x in (before, after)]  # type: ignore[union-attr]
    if shapes[0] != shapes[1] or dtypes[0] != dtypes[1]:
        raise ValueError(f"merge: expected sums of one shape and dtype, got {shapes} in {dtypes}")
    if (before.segment is None) != (after.segment is None):
        raise ValueError("merge: expected two states made with segment_ids, or two made without, got one of each")


def check_method(state: State, method: Any) -> None:
    """Raise ValueError unless the state was made by this method, with the same projections."""
    if state.method is not method and state.method != method:
        expected, got = label_of(method), label_of(state.method)  # type: ignore[arg-type]
        if expected == got:
            got = f"the same with another {_difference(state.method, method)}"
        raise ValueError(f"state: expected one made by {expected}, got one made by {got}")
    old, new = getattr(state.method, "matrix", None), getattr(method, "matrix", None)
    if (
        old is not new
        and not torch.compiler.is_compiling()
        and (old is None or new is None or not torch.equal(old, new))
    ):
        raise ValueError("state: expected one made with the same matrix of random projections, got one with another")


def check_scale(state: State, scale: float) -> None:
    """Raise ValueError unless the state was made with this factor of the logits."""
    if abs(state.scale - scale) > SCALE_TOLERANCE * abs(state.scale):
        raise ValueError(
            f"scale: expected {state.scale!r}, with which the state was made, got {scale!r} (the default is "
            f"1/sqrt(width)); pass scale={state.scale!r} to every call that continues this state"
        )


def check_state(
    state: State, method: Any, layout: Layout, has_segments: bool, dtype: torch.dtype, scale: float
) -> None:
    """Raise ValueError unless the state was made with this method, batch, width, dtype, use of segments and scale."""
    check_method(state, method)
    if state.sums is None and state.keys is None and not state.parts:
        return  # No key has been seen.
    if (state.segment is not None) != has_segments:
        made = "with" if state.segment is not None else "without"
        raise ValueError(f"state: it was made {made} segment_ids; expected the next call {made} them too")
    lead, wide = (*layout.batch, layout.key_heads), torch.promote_types(dtype, torch.float32)
    expected: tuple[int, ...] = (*lead, layout.width, layout.value_width)
    if state.sums is not None and state.keys is None:
        found, expected = tuple(state.sums.shape), (*lead, method.size(layout.width), layout.value_width + 1)
        found_dtype, wanted_dtype = state.sums.dtype, wide
    elif state.widths is not None:
        assert state.filled is not None
        found, found_dtype, wanted_dtype = (*state.filled.shape, *state.widths), state.parts[1].dtype, wide
    else:
        assert state.keys is not None and state.values is not None
        found = (*state.keys.shape[:-2], state.keys.shape[-1], state.values.shape[-1])
        found_dtype, wanted_dtype = state.keys.dtype, dtype
    if found != expected or found_dtype != wanted_dtype:
        raise ValueError(f"state: expected {expected} in {wanted_dtype} for these inputs, got {found} in {found_dtype}")
    check_scale(state, scale)


def _difference(one: Any, other: Any) -> str:
    """Return the names of the fields in which methods with the same label differ."""
    if not is_dataclass(one) or type(one) is not type(other):
        return "map"
    names = (each.name for each in fields(one) if each.compare)
    return " and ".join(name for name in names if getattr(one, name) != getattr(other, name))
