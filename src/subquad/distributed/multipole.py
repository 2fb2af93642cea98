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
    call = call.factored()
    q, k, v = call.folded()
    parts = (k, v, call.keep(), None if runs is None else runs.numbers)
    k, v, keep, numbers = (None if x is None else gathered(x, peers) for x in parts)
    assert k is not None and v is not None
    start, end = peers.start, peers.start + call.layout.keys
    if call.is_causal:  # Later keys are not seen.
        k, v, keep, numbers = (None if x is None else x[:, :end] for x in (k, v, keep, numbers))
    if numbers is not None:  # Segments need a row for each key: the rows of other ranks are dropped again.
        q = F.pad(q, (0, 0, start, k.shape[1] - end))
    whole = Call.of(
        q, k[:, None], v[:, None], is_causal=call.is_causal, scale=call.logit_scale, enable_gqa=True,
        key_padding_mask=keep, segment_ids=numbers,
    )  # fmt: skip
    with torch.autocast(call.layout.device.type, enabled=False):
        output = run(method, whole if numbers is not None else whole._replace(first_row=start)).output
    return call.unfolded(output if numbers is None else output[:, :, start:end])
