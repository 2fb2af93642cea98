"""Attention to gathered sums: each rank adds up its own keys, and all ranks exchange the sums at once.

With segments and without causality a rank sends two states, of its last and of its first segment, which may continue on
the next rank and on the one before. While the states of some heads travel, other heads are computed. In the backward
pass the gradients of the sums that a rank has read are exchanged in the same way.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad._calls.state import State
from subquad.distributed.parcels import Parcel
from subquad.distributed.peers import Gathering
from subquad.distributed.recorded import Exchange, gradients
from subquad.distributed.setup import Piece, Setup, Tokens, collected, joined, placed


class Views(NamedTuple):
    """What a rank sees of the keys of others."""

    earlier: State | None
    later: State | None  # only where earlier and later keys must be told apart
    total: State | None  # of all ranks, for the state that is returned


class Gathered(Exchange):
    """Attention to the sums of all ranks, or of earlier ones."""

    total: State  # without its sums, a result: a node that holds its own result waits for the garbage collector

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.is_sided = setup.tokens.runs is not None and not setup.is_causal
        self.sums: list[Piece] = []  # of each group: from keys and values to the sums of this rank
        self.reads: list[Piece] = []  # from tokens and the sums of other ranks to the output
        self.states: list[list[list[State]]] = []  # of each group, rank and side

    def forward(self, *tensors: Any) -> tuple[Tensor, ...]:
        setup = self.setup
        q, k, v, _ = tensors
        tokens = setup.tokens._replace(q=q, k=k, v=v)
        travelling = [self._add_up(tokens.heads(rows)) for rows in setup.groups]
        totals, whole = [], None
        for rows, (parcel, gathering) in zip(setup.groups, travelling, strict=True):
            states = [self._opened(parcel, data, rank) for rank, data in enumerate(gathering.wait())]
            views = self._views(states, setup.before_of(rows))[setup.peers.rank]
            whole = placed(self._read(tokens.heads(rows), views), rows, whole, len(q))
            has_total = views.total is not None and views.total.sums is not None
            totals.append(views.total if has_total else setup.empty(tokens.heads(rows)))
            self.states.append(states)
        assert whole is not None
        if not setup.return_state:
            return whole, whole.new_zeros(())
        total = joined(totals)  # type: ignore[arg-type]
        assert total.sums is not None
        self.total = replace(total, sums=None)
        return whole, total.sums

    def _add_up(self, tokens: Tokens) -> tuple[Parcel, Gathering]:
        """Add up the keys of some heads, and start to exchange their states."""
        k, v = self.leaf(tokens.k), self.leaf(tokens.v)
        with self.recording():
            own = tokens._replace(k=k, v=v)
            states = [self.setup.summed(own, is_last) for is_last in ((True, False) if self.is_sided else (True,))]
        self.sums.append(Piece([k, v], [x.sums for x in states if x.sums is not None]))
        parcel = Parcel(self.setup.empty(tokens))
        return parcel, self.setup.peers.begin_gather(torch.stack([parcel.packed(x) for x in states]))

    def _opened(self, parcel: Parcel, data: Tensor, rank: int) -> list[State]:
        length = self.setup.peers.lengths[rank]
        if length == 0:  # Merging leaves out a state without sums.
            return [State(self.setup.method, 0, self.setup.scale) for _ in data]
        return [parcel.opened(side, length) for side in data]

    def _views(self, states: Sequence[Sequence[State]], before: State | None) -> list[Views]:
        """Return what each rank sees, from the states of all ranks and sides."""
        forward = accumulated([before, *(sides[0] for sides in states)])
        total = forward[-1]
        if not self.is_sided:
            return [Views(x if self.setup.is_causal else total, None, total) for x in forward[:-1]]
        backward = accumulated([None, *(sides[1] for sides in reversed(states))])[:-1]
        return [Views(*both, total) for both in zip(forward[:-1], reversed(backward), strict=True)]

    def _read(self, tokens: Tokens, views: Views) -> Tensor:
        """Return the output of some heads, and keep their graph."""
        setup = self.setup
        q, k, v = (self.leaf(x) for x in tokens[:3])
        sides = [None if x is None or x.sums is None else replace(x, sums=self.leaf(x.sums)) for x in views[:2]]
        own = tokens._replace(q=q, k=k, v=v)
        if not setup.is_causal and not self.is_sided:  # Its own keys are in the state.
            own = Tokens(q, k[:, :0], v[:, :0])
        with self.recording():
            output, _ = setup.compute(own, sides[0], sides[1])
        sums = [x.sums for x in sides if x is not None and x.sums is not None]
        self.reads.append(Piece([q, k, v, *sums], [output]))
        return output.detach()

    def backward(self, *grads: Tensor | None) -> Sequence[Tensor | None]:
        setup, peers = self.setup, self.setup.peers
        grad, total_grad = grads
        found, travelling, before_grads = [], [], []
        for i, rows in enumerate(setup.groups):
            own = self.reads[i].gradients(None if grad is None else grad[rows])
            views = self._views(self.states[i], setup.before_of(rows))[peers.rank]
            given = [x is not None and x.sums is not None for x in views[:2]]
            own, sums = own[: len(own) - sum(given)], own[len(own) - sum(given) :]
            nothing = torch.zeros_like(self.sums[i].results[0])
            parts = [sums.pop(0) if is_given else nothing for is_given in given]
            parts.append(nothing if total_grad is None or not setup.return_state else total_grad[rows])
            travelling.append(peers.begin_gather(torch.stack([parts[j] for j in self._sent])))
            found.append(own)
        for i, rows in enumerate(setup.groups):
            before_grad, own_grads = self._grads_of_states(i, rows, travelling[i].wait())
            before_grads.append(before_grad)
            without_keys: list[Tensor | None] = [None] * len(self.sums[i].results)
            added = self.sums[i].gradients(*(own_grads or without_keys))
            found[i] = [found[i][0], *map(torch.add, found[i][1:], added)]
        self.sums, self.reads, self.states = [], [], []
        return collected(found, None if setup.before is None else torch.cat(before_grads))  # type: ignore[arg-type]

    @property
    def _sent(self) -> list[int]:
        """The fields of `Views` whose gradients travel."""
        return [0, *([1] if self.is_sided else []), *([2] if self.setup.return_state else [])]

    def _grads_of_states(self, i: int, rows: slice, grads: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradients of the sums before all ranks, on this rank, and of this rank's own sums."""
        rank, before = self.setup.peers.rank, self.setup.before_of(rows)
        own = [replace(x, sums=None if x.sums is None else self.leaf(x.sums)) for x in self.states[i][rank]]
        states = [*self.states[i][:rank], own, *self.states[i][rank + 1 :]]
        if before is not None and before.sums is not None:
            before = replace(before, sums=self.leaf(before.sums))
        leaves = [x.sums for x in own if x.sums is not None]
        with torch.enable_grad():
            views = self._views(states, before)
        results = [[view[j] for j in self._sent] for view in views]
        everything = [state for view in results for state in view]
        found = _gradients_of(everything, [part for grad in grads for part in grad], leaves)
        if before is None or before.sums is None:
            return None, found
        return _gradients_of(results[rank], list(grads[rank]), [before.sums])[0], found


def _gradients_of(states: list[State | None], grads: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of leaves, given those of states, some of which have no sums."""
    pairs = [(x.sums, grad) for x, grad in zip(states, grads, strict=True) if x is not None and x.sums is not None]
    return gradients([x for x, _ in pairs], [x for _, x in pairs], leaves, keeps_graph=True)


def accumulated(states: Sequence[State | None]) -> list[State | None]:
    """Return the states of the first part, of the first two parts, and so on; None if there is none."""
    found = [states[0]]
    for state in states[1:]:
        old = found[-1]
        found.append(state if old is None or state is None else State.merge(old, state))
    return found
