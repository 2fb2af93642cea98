"""Causal attention in turn: each rank continues from the state of the rank before it, and passes its own on.

Some heads at a time, so that a rank can begin as soon as the rank before it has finished its first heads. The backward
pass goes the other way: the gradients of the sums travel to earlier ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subquad._calls.state import State
from subquad.distributed.parcels import Parcel
from subquad.distributed.recorded import Exchange
from subquad.distributed.setup import Piece, Setup, Tokens, collected, joined, placed


class InTurn(Exchange):
    """Causal attention from state to state: each rank continues where the one before it stopped."""

    total: State  # without its sums, a result: a node that holds its own result waits for the garbage collector

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pieces: list[Piece] = []

    def forward(self, *tensors: Any) -> tuple[Tensor, ...]:
        setup, peers = self.setup, self.setup.peers
        q, k, v, _ = tensors
        tokens = setup.tokens._replace(q=q, k=k, v=v)
        parcels = [Parcel(setup.empty(tokens.heads(rows))) for rows in setup.groups]
        arriving = [peers.receive(parcel.room(), peers.rank - 1) for parcel in parcels] if peers.rank else []
        sent, states, whole = [], [], None
        for i, (rows, parcel) in enumerate(zip(setup.groups, parcels, strict=True)):
            before = parcel.opened(arriving[i].wait(), peers.start) if peers.rank else setup.before_of(rows)
            output, after = self._continue(tokens.heads(rows), before)
            if peers.rank + 1 < peers.size:
                sent.append(peers.send(parcel.packed(after), peers.rank + 1))
            whole = placed(output, rows, whole, len(q))
            states.append(after)
        for transfer in sent:
            transfer.wait()
        assert whole is not None
        if not setup.return_state:
            return whole, whole.new_zeros(())
        parcel = Parcel(setup.empty(tokens))
        total = parcel.opened(peers.broadcast(parcel.packed(joined(states)), peers.size - 1), 0)
        assert total.sums is not None
        self.total = replace(total, sums=None)
        return whole, total.sums

    def _continue(self, tokens: Tokens, before: State | None) -> tuple[Tensor, State]:
        """Compute some heads; return their output and state, and keep their graph."""
        q, k, v = (self.leaf(x) for x in tokens[:3])
        leaves = [q, k, v]
        if before is not None and before.sums is not None:
            sums = self.leaf(before.sums)
            before = replace(before, sums=sums)
            leaves.append(sums)
        with self.recording():
            output, after = self.setup.compute(tokens._replace(q=q, k=k, v=v), before, return_state=True)
        if after.sums is None:  # no keys so far
            after = self.setup.empty(tokens)
        assert after.sums is not None
        if self.is_recorded:
            self.pieces.append(Piece(leaves, [output, after.sums]))
        return output.detach(), after.detach()

    def backward(self, *grads: Tensor | None) -> Sequence[Tensor | None]:
        setup, peers, pieces = self.setup, self.setup.peers, self.pieces
        grad, total_grad = grads
        if setup.return_state:  # Every rank holds a copy of the last rank's state.
            nothing = setup.empty(setup.tokens).sums
            assert nothing is not None
            total_grad = peers.summed(nothing if total_grad is None else total_grad)
        is_last = peers.rank + 1 == peers.size
        arriving = [] if is_last else [peers.receive(piece.results[1], peers.rank + 1) for piece in pieces]
        has_sums = bool(peers.rank) or setup.before is not None
        sent, found, before_grads = [], [], []
        for i, (rows, piece) in enumerate(zip(setup.groups, pieces, strict=True)):
            after_grad = arriving[i].wait() if arriving else None if total_grad is None else total_grad[rows]
            own = piece.gradients(None if grad is None else grad[rows], after_grad)
            if has_sums:
                before_grads.append(own.pop())
            if peers.rank:
                sent.append(peers.send(before_grads[-1], peers.rank - 1))
            found.append(own)
        for transfer in sent:
            transfer.wait()
        self.pieces = []
        return collected(found, torch.cat(before_grads) if has_sums and peers.rank == 0 else None)
