"""One call of a feature method over several ranks: its tokens, and the computations that it is made of.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.state import State
from subquad._engines import run
from subquad._engines.features.method_kernel import kernel_of
from subquad.distributed.peers import Peers
from subquad.distributed.recorded import gradients
from subquad.methods.method import feature_method

MIN_GROUP_TOKENS = 4096  # in which the overhead of a call and of a message is small


class Tokens(NamedTuple):
    """The folded inputs of a rank, or of some of its heads."""

    q: Tensor  # (b, g, n, d)
    k: Tensor  # (b, m, d); or (b, m, d + 1), the last column a log-scale
    v: Tensor  # (b, m, e)
    keep: Tensor | None = None  # (b, m), True = may be seen
    runs: Tensor | None = None  # (b, m), segments, numbered through all ranks

    def heads(self, rows: slice) -> "Tokens":
        return Tokens(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Setup:
    """One call, the same on all ranks except for its tokens."""

    method: Any
    tokens: Tokens
    peers: Peers
    before: State | None  # the keys before those of all ranks; tensors (b, 1, ...)
    is_causal: bool
    scale: float
    return_state: bool

    @property
    def groups(self) -> list[slice]:
        """Heads that are computed together; the same on all ranks."""
        heads, longest = self.tokens.q.shape[0], max(1, *self.peers.lengths)
        size = max(1, self.peers.threads, -(-MIN_GROUP_TOKENS // longest))
        return [slice(start, min(start + size, heads)) for start in range(0, heads, size)]

    def before_of(self, rows: slice) -> State | None:
        return None if self.before is None else self.before[rows]

    def compute(
        self, tokens: Tokens, before: State | None, following: State | None = None, return_state: bool = False
    ) -> tuple[Tensor, State]:
        """Return (b, g, n, e) of some heads between the keys of two states, and the state after them."""
        q, k, v, keep, runs = tokens
        k, log_scales = _split(k, q.shape[-1])
        call = Call.of(
            q, k[:, None], v[:, None], is_causal=self.is_causal, scale=self.scale, enable_gqa=True,
            key_padding_mask=keep, segment_ids=runs, state=before, return_state=return_state,
        )  # fmt: skip
        output, state, _ = run(self.method, call._replace(following=following, log_scales=log_scales))
        assert state is not None or not return_state
        return output, state  # type: ignore[return-value]

    def summed(self, tokens: Tokens, last: bool) -> State:
        """Return the state of the keys; with segments, of the last one alone, or of the first."""
        q, k, v, keep, runs = tokens
        if k.shape[1] == 0:
            return self.empty(tokens)
        own, named = keep, dict[str, Any]()
        if runs is not None:
            edge = runs[:, -1:] if last else runs[:, :1]
            inside = runs == edge
            own = inside if keep is None else keep & inside
            named = dict(segment=edge, is_whole=inside.all(1, keepdim=True))
        k, log_scales = _split(k, q.shape[-1])
        call = Call.of(
            q[:, :, :0], k[:, None], v[:, None], scale=self.scale, enable_gqa=True, key_padding_mask=own,
            return_state=True,
        )  # fmt: skip
        state = run(self.method, call._replace(log_scales=log_scales)).state
        assert state is not None
        return replace(state, **named)

    def empty(self, tokens: Tokens) -> State:
        """Return the state of no keys, with all of its tensors."""
        q, k, v = (x.detach() for x in tokens[:3])
        kernel, _, k = kernel_of(feature_method(self.method), q[:, :, :0], k[:, :0], self.scale)
        sums = kernel.empty(k, v)
        named: dict[str, Any] = dict(sums=sums.values[:, None], poison=sums.poison[:, None])
        if sums.log_scale is not None:
            named["log_scale"] = sums.log_scale[:, None]
        if tokens.runs is not None:
            segment = tokens.runs.new_full((len(v), 1), -1)
            named |= dict(segment=segment, is_whole=torch.ones_like(segment, dtype=torch.bool))
        return State(self.method, 0, self.scale, **named)


def _split(k: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Return the keys (b, m, d), and their log-scales if they are the last column."""
    return (k, None) if k.shape[-1] == width else (k[..., :width], k[..., width])


class Piece(NamedTuple):
    """Some heads: the tensors with which their graph begins, and those with which it ends."""

    leaves: list[Tensor]
    results: list[Tensor]

    def gradients(self, *grads: Tensor | None) -> list[Tensor]:
        return gradients(self.results, grads, self.leaves)


def placed(part: Tensor, rows: slice, whole: Tensor | None, heads: int) -> Tensor:
    """Return the output of all heads with that of some in its place; `whole` is None before the first.

    Joining all parts at the end would write everything twice, to fresh memory: a seventh of the time of a call.
    """
    whole = part.new_empty(heads, *part.shape[1:]) if whole is None else whole
    whole[rows] = part
    return whole


def joined(states: Sequence[State]) -> State:
    """Return the state of all heads from those of groups of heads."""
    named: dict[str, Any] = {name: torch.cat([x._tensors()[name] for x in states]) for name in states[0]._tensors()}
    return replace(states[0], **named)


def collected(found: Sequence[Sequence[Tensor]], sums: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of q, k, v and the sums before all ranks, from those of all groups."""
    return [*(torch.cat(part) for part in zip(*found, strict=True)), sums]
