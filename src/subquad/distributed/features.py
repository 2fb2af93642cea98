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

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.state import State
from subquad._engines.features.alignment import aligned
from subquad._engines.features.mapped import mapped
from subquad.distributed.gathered import Gathered
from subquad.distributed.in_turn import InTurn
from subquad.distributed.peers import Peers
from subquad.distributed.segments import Runs
from subquad.distributed.setup import Setup, Tokens
from subquad.methods.method import feature_method

GATHERED_OVERHEAD = 0.45  # time for adding up keys, over that of causal attention, on one thread


def attend(method: Any, call: Call, peers: Peers, runs: Runs | None) -> tuple[Tensor, State | None]:
    """Return the output of this rank's queries (..., heads, n, e), and the state of all ranks' keys if wanted."""
    features = feature_method(method)
    names = ("key_shift", "query_shift", "balance")
    vectors = {name: None for name in names if getattr(features, name) is not None}
    plain, whole = replace(method, **vectors) if vectors else method, call
    if features.is_learned:  # Outside the exchange, so that plain differentiation finds its parameters.
        plain, call = mapped(method, call)[:2]
    q, k = aligned(features, call)
    tokens = Tokens(q, k, call.folded()[2], call.keep(), None if runs is None else runs.numbers)
    setup = Setup(plain, tokens, peers, _folded(plain, call), call.is_causal, call.logit_scale, call.return_state)
    exchange = InTurn(setup) if runs_in_turn(setup) else Gathered(setup)
    sums = None if setup.before is None else setup.before.sums
    output, total = exchange.run(tokens.q, tokens.k, tokens.v, sums)
    state = _after(method, whole, peers, runs, replace(exchange.total, sums=total)) if call.return_state else None
    return call.unfolded(output), state


def runs_in_turn(setup: Setup) -> bool:
    return setup.is_causal and setup.peers.size - 1 <= GATHERED_OVERHEAD * len(setup.groups)


def _folded(method: Any, call: Call) -> State | None:
    """Return the state of a call as the heads see it: (b, 1, ...)."""
    state, rows = call.state, call.layout.rows
    if state is None or state.sums is None:
        return None
    lead = len(call.layout.batch) + 1
    named: dict[str, Any] = {name: x.reshape(rows, 1, *x.shape[lead:]) for name, x in state._tensors().items()}
    if state.segment is not None:
        named["segment"] = torch.zeros_like(named["segment"])  # The runs are numbered from that of the state on.
    return State(method, state.length, call.logit_scale, **named)


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
