"""Multipole over several ranks: every rank gathers the keys and values of all, as far as its queries see them.

Its queries read few keys each, but choose them among all blocks, and the queries of a slice together read nearly every
block. Gathering the moments first and then only the keys that were chosen would therefore send nearly as much, in two
rounds that wait for each other; docs/log.md has the figures. So the volume grows with the length.

Axes: b batch and key heads, n queries and m keys of this rank, d width, e value width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.call import Call
from subquad._engines import run
from subquad.distributed.gathering import gathered
from subquad.distributed.peers import Peers
from subquad.distributed.segments import Runs


def attend(method: Any, call: Call, peers: Peers, runs: Runs | None) -> Tensor:
    """Return the output of this rank's queries (..., heads, n, e)."""
    q, k, v = call.folded()
    start, end = peers.start, peers.start + call.layout.keys
    seen = slice(0, end if call.is_causal else None)
    k, v = gathered(k, peers)[:, seen], gathered(v, peers)[:, seen]
    # Every rank takes part in every exchange, also one whose own keys are all visible.
    shown = torch.ones(q.shape[0], call.layout.keys, dtype=torch.bool, device=q.device)
    own_keep = call.keep()
    keep = gathered(shown if own_keep is None else own_keep, peers)[:, seen]
    numbers = None if runs is None else gathered(runs.numbers, peers)[:, seen]
    if numbers is not None:  # Segments need a row for each key: the rows of other ranks are dropped again.
        q = F.pad(q, (0, 0, start, k.shape[1] - end))
    whole = Call.of(
        q, k[:, None], v[:, None], is_causal=call.is_causal, scale=call.logit_scale, enable_gqa=True,
        key_padding_mask=None if bool(keep.all()) else keep, segment_ids=numbers,
    )  # fmt: skip
    output = run(method, whole if numbers is not None else whole._replace(first_row=start)).output
    output = output if numbers is None else output[:, :, start:end]
    if call.is_empty:  # It depends on no key, yet its rank takes part in the exchange of gradients.
        output = output + k[:, :0].sum() + v[:, :0].sum()
    return call.unfolded(output)
