"""Feature methods over several ranks: only sums of keys travel, whose size does not depend on the length.

    not causal           add up the own keys -> gather the sums of all ranks -> every query reads the sums of all
    causal, in turn      continue from the state of the rank before, some heads at a time, and pass the state on
    causal, gathered     add up the own keys -> gather the sums of all ranks -> continue from those of earlier ranks

In turn, nothing is computed twice, but rank p begins when rank p - 1 has finished its first heads: with P ranks and G
groups of heads, the last one ends after 1 + (P - 1) / G times the time of a slice. Gathered, keys are added up once
more, and the time is 1 + GATHERED_OVERHEAD whatever P is. Both directions do the same: the gradients of the sums travel
from later ranks to earlier ones.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad._calls.call import Call
from subquad._calls.state import State
from subquad._engines import run
from subquad._engines.features.method_kernel import kernel_of, shifted
from subquad.distributed.parcels import Parcel
from subquad.distributed.peers import Gathering, Peers
from subquad.distributed.recorded import Exchange, gradients
from subquad.distributed.segments import Runs
from subquad.methods.method import feature_method

GATHERED_OVERHEAD = 0.45  # time for adding up keys, over that of causal attention, on one thread
MIN_GROUP_TOKENS = 4096  # in which the overhead of a call and of a message is small


class Tokens(NamedTuple):
    """The folded inputs of a rank, or of some of its heads."""

    q: Tensor  # (b, g, n, d)
    k: Tensor  # (b, m, d)
    v: Tensor  # (b, m, e)
    keep: Tensor | None = None  # (b, m), True = may be seen
    runs: Tensor | None = None  # (b, m), segments, numbered through all ranks

    def heads(self, rows: slice) -> "Tokens":
        return Tokens(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


def attend(method: Any, call: Call, peers: Peers, runs: Runs | None) -> tuple[Tensor, State | None]:
    """Return the output of this rank's queries (..., heads, n, e), and the state of all ranks' keys if wanted."""
    features = feature_method(method)
    plain = method
    if features.key_shift is not None:
        call = call._replace(key=shifted(features, call.key, call.layout.key_heads))
        plain = replace(method, key_shift=None)
    call = call.factored()
    tokens = Tokens(*call.folded(), call.keep(), None if runs is None else runs.numbers)
    setup = Setup(plain, tokens, peers, _folded(plain, call), call.is_causal, call.logit_scale, call.return_state)
    exchange = InTurn(setup) if setup.runs_in_turn else Gathered(setup)
    learned = method.parameters() if isinstance(method, nn.Module) else ()
    sums = None if setup.before is None else setup.before.sums
    output, total = exchange.run(tokens.q, tokens.k, tokens.v, sums, *learned)
    state = _after(method, call, peers, runs, replace(exchange.total, sums=total)) if call.return_state else None
    return call.unfolded(output), state


def _folded(method: Any, call: Call) -> State | None:
    """Return the state of a call as the heads see it: (b, 1, ...)."""
    state, rows = call.state, call.layout.rows
    if state is None or state.sums is None:
        return None
    lead = len(call.layout.batch) + 1
    named: dict[str, Any] = {name: x.reshape(rows, 1, *x.shape[lead:]) for name, x in state._tensors().items()}
    if state.segment is not None:
        named["segment"] = torch.zeros_like(named["segment"])  # The runs are numbered from that of the state on.
    return State(method, state.length, state.scale, **named)


def _after(method: Any, call: Call, peers: Peers, runs: Runs | None, total: State) -> State:
    """Return the state of all keys in the layout of the call."""
    layout, before = call.layout, call.state
    length = sum(peers.lengths) + (0 if before is None else before.length)
    kept = ("sums", "poison", "log_scale")
    named: dict[str, Any] = {name: layout.unfold(x[:, 0]) for name, x in total._tensors().items() if name in kept}
    if runs is not None:
        is_whole = layout.unfold(runs.is_whole)
        has_whole = before is not None and before.is_whole is not None
        named["is_whole"] = is_whole & before.is_whole if has_whole else is_whole  # type: ignore[union-attr, operator]
        named["segment"] = layout.unfold(runs.last_id)
    return State(method, length, call.logit_scale, **named)


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

    @property
    def runs_in_turn(self) -> bool:
        return self.is_causal and self.peers.size - 1 <= GATHERED_OVERHEAD * len(self.groups)

    def before_of(self, rows: slice) -> State | None:
        return None if self.before is None else self.before[rows]

    def compute(
        self, tokens: Tokens, before: State | None, following: State | None = None, return_state: bool = False
    ) -> tuple[Tensor, State]:
        """Return (b, g, n, e) of some heads between the keys of two states, and the state after them."""
        q, k, v, keep, runs = tokens
        call = Call.of(
            q, k[:, None], v[:, None], is_causal=self.is_causal, scale=self.scale, enable_gqa=True,
            key_padding_mask=keep, segment_ids=runs, state=before, return_state=return_state,
        )  # fmt: skip
        output, state, _ = run(self.method, call._replace(following=following))
        assert state is not None or not return_state
        return output, state  # type: ignore[return-value]

    def summed(self, tokens: Tokens, last: bool) -> State:
        """Return the state of the keys; with segments, of the last one alone, or of the first."""
        q, k, v, keep, runs = tokens
        if k.shape[1] == 0:
            return self.empty(tokens)
        if runs is None:
            own, named = keep, {}
        else:
            edge = runs[:, -1:] if last else runs[:, :1]
            inside = runs == edge
            own = inside if keep is None else keep & inside
            named = dict(segment=edge, is_whole=inside.all(1, keepdim=True))
        call = Call.of(
            q[:, :, :0], k[:, None], v[:, None], scale=self.scale, enable_gqa=True, key_padding_mask=own,
            return_state=True,
        )  # fmt: skip
        state = run(self.method, call).state
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


class Piece(NamedTuple):
    """Some heads: the tensors with which their graph begins, and those with which it ends."""

    leaves: list[Tensor]
    results: list[Tensor]

    def gradients(self, *grads: Tensor | None) -> list[Tensor]:
        return gradients(self.results, grads, self.leaves)


def joined(states: Sequence[State]) -> State:
    """Return the state of all heads from those of groups of heads."""
    named: dict[str, Any] = {name: torch.cat([x._tensors()[name] for x in states]) for name in states[0]._tensors()}
    return replace(states[0], **named)


def collected(found: Sequence[Sequence[Tensor]], sums: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of q, k, v, the sums before all ranks, and learned parameters from those of all groups."""
    parts = list(zip(*found, strict=True))
    return [*(torch.cat(part) for part in parts[:3]), sums, *(reduce(torch.add, part) for part in parts[3:])]


class InTurn(Exchange):
    """Causal attention from state to state: each rank continues where the one before it stopped."""

    total: State

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pieces: list[Piece] = []

    def forward(self, *tensors: Any) -> tuple[Tensor, ...]:
        setup, peers = self.setup, self.setup.peers
        q, k, v, _, *learned = tensors
        tokens = setup.tokens._replace(q=q, k=k, v=v)
        parcels = [Parcel(setup.empty(tokens.heads(rows))) for rows in setup.groups]
        arriving = [peers.receive(parcel.room(), peers.rank - 1) for parcel in parcels] if peers.rank else []
        sent, outputs, states = [], [], []
        for i, (rows, parcel) in enumerate(zip(setup.groups, parcels, strict=True)):
            before = parcel.opened(arriving[i].wait(), peers.start) if peers.rank else setup.before_of(rows)
            output, after = self._continue(tokens.heads(rows), before, learned)
            if peers.rank + 1 < peers.size:
                sent.append(peers.send(parcel.packed(after), peers.rank + 1))
            outputs.append(output)
            states.append(after)
        for transfer in sent:
            transfer.wait()
        if not setup.return_state:
            return torch.cat(outputs), outputs[0].new_zeros(())
        whole = Parcel(setup.empty(tokens))
        self.total = whole.opened(peers.broadcast(whole.packed(joined(states)), peers.size - 1), 0)
        assert self.total.sums is not None
        return torch.cat(outputs), self.total.sums

    def _continue(self, tokens: Tokens, before: State | None, learned: Sequence[Tensor]) -> tuple[Tensor, State]:
        """Compute some heads; return their output and state, and keep their graph."""
        q, k, v = (self.leaf(x) for x in tokens[:3])
        leaves = [q, k, v, *learned]
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
            assert self.total.sums is not None
            total_grad = peers.summed(torch.zeros_like(self.total.sums) if total_grad is None else total_grad)
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


class Views(NamedTuple):
    """What a rank sees of the keys of others."""

    earlier: State | None
    later: State | None  # only where earlier and later keys must be told apart
    total: State | None  # of all ranks, for the state that is returned

    def sums(self) -> list[Tensor | None]:
        return [None if x is None else x.sums for x in self]


class Gathered(Exchange):
    """Attention to the sums of other ranks, which all ranks exchange at once.

    Each rank sends the state of its keys; with segments and without causality two, of its last and its first segment.
    While the states of some heads travel, other heads are computed.
    """

    total: State

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.is_sided = setup.tokens.runs is not None and not setup.is_causal
        self.sums: list[Piece] = []  # of each group: from keys and values to the sums of this rank
        self.reads: list[Piece] = []  # from tokens and the sums of other ranks to the output
        self.states: list[list[list[State]]] = []  # of each group, rank and side

    def forward(self, *tensors: Any) -> tuple[Tensor, ...]:
        setup = self.setup
        q, k, v, _, *learned = tensors
        tokens = setup.tokens._replace(q=q, k=k, v=v)
        travelling = [self._add_up(tokens.heads(rows), learned) for rows in setup.groups]
        outputs, totals = [], []
        for rows, (parcel, gathering) in zip(setup.groups, travelling, strict=True):
            states = [self._opened(parcel, data, rank) for rank, data in enumerate(gathering.wait())]
            views = self._views(states, setup.before_of(rows))[setup.peers.rank]
            outputs.append(self._read(tokens.heads(rows), views, learned))
            has_total = views.total is not None and views.total.sums is not None
            totals.append(views.total if has_total else setup.empty(tokens.heads(rows)))
            self.states.append(states)
        if not setup.return_state:
            return torch.cat(outputs), outputs[0].new_zeros(())
        self.total = joined(totals)  # type: ignore[arg-type]
        assert self.total.sums is not None
        return torch.cat(outputs), self.total.sums

    def _add_up(self, tokens: Tokens, learned: Sequence[Tensor]) -> tuple[Parcel, Gathering]:
        """Add up the keys of some heads, and start to exchange their states."""
        k, v = self.leaf(tokens.k), self.leaf(tokens.v)
        with self.recording():
            own = tokens._replace(k=k, v=v)
            states = [self.setup.summed(own, is_last) for is_last in ((True, False) if self.is_sided else (True,))]
        self.sums.append(Piece([k, v, *learned], [x.sums for x in states if x.sums is not None]))
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

    def _read(self, tokens: Tokens, views: Views, learned: Sequence[Tensor]) -> Tensor:
        """Return the output of some heads, and keep their graph."""
        setup = self.setup
        q, k, v = (self.leaf(x) for x in tokens[:3])
        sides = [None if x is None or x.sums is None else replace(x, sums=self.leaf(x.sums)) for x in views[:2]]
        own = tokens._replace(q=q, k=k, v=v)
        if not setup.is_causal and not self.is_sided:  # Its own keys are in the state.
            own = Tokens(q, k[:, :0], v[:, :0])
        with self.recording():
            output, _ = setup.compute(own, *sides)
        sums = [x.sums for x in sides if x is not None and x.sums is not None]
        self.reads.append(Piece([q, k, v, *learned, *sums], [output]))
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
            added = self.sums[i].gradients(*(own_grads or [None] * len(self.sums[i].results)))  # none without keys
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
        results, theirs = [], []
        for view, grad in zip(views, grads, strict=True):
            for sums, part in zip((view.sums()[j] for j in self._sent), grad, strict=True):
                if sums is not None:
                    results.append(sums)
                    theirs.append(part)
        found = gradients(results, theirs, leaves, keeps_graph=True)
        if before is None or before.sums is None:
            return None, found
        mine = [(sums, part) for sums, part in zip((views[rank].sums()[j] for j in self._sent), grads[rank], strict=True)
                if sums is not None]  # fmt: skip
        return gradients([x for x, _ in mine], [x for _, x in mine], [before.sums])[0], found


def accumulated(states: Sequence[State | None]) -> list[State | None]:
    """Return the states of the first part, of the first two parts, and so on; None if there is none."""
    found = [states[0]]
    for state in states[1:]:
        old = found[-1]
        found.append(state if old is None or state is None else State.merge(old, state))
    return found
