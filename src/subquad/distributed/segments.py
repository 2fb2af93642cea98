"""Segments that cross ranks: numbered through the whole sequence, so that equal numbers mean one segment.

A segment is a run of equal ids. The same id after another one begins a new segment, which a rank cannot see if the
other one lies on an earlier rank. Each rank tells how its slice begins and ends; the volume is four numbers per head.

Axes: b batch and key heads, m keys of this rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad.distributed.peers import Peers


class Runs(NamedTuple):
    """The segments of this rank's keys, and of the whole sequence."""

    numbers: Tensor  # (b, m): 0, 1, 2, ... through all ranks; 0 continues the last segment of a state
    last_id: Tensor  # (b,): the id of the last key of all ranks
    is_whole: Tensor  # (b,): whether all keys of all ranks are of segment 0


def number_runs(call: Call, segment_ids: Tensor, peers: Peers) -> Runs:
    """Number the segments of all ranks."""
    layout, before = call.layout, None if call.state is None else call.state.segment
    ids = layout.fold_mask("segment_ids", segment_ids, layout.keys).long()  # (b, m)
    b, m = ids.shape
    changes = (torch.diff(ids, dim=1) != 0).long()
    if m:
        own = torch.stack([ids[:, 0], ids[:, -1], changes.sum(1), torch.ones_like(ids[:, 0])], 1)
    else:
        own = ids.new_zeros(b, 4)
    last = ids.new_zeros(b) if before is None else before.reshape(b).to(ids)
    number, start, has_begun = ids.new_zeros(b), ids.new_zeros(b), before is not None
    for rank, told in enumerate(peers.gather(own)):
        first, final, count, is_there = told.unbind(1)
        if not bool(is_there.all()):
            continue
        number = number + (first != last).long() if has_begun else number
        if rank == peers.rank:
            start = number
        number, last, has_begun = number + count, final, True
    numbers = start[:, None] + torch.nn.functional.pad(changes.cumsum(1), (1, 0)) if m else ids
    return Runs(numbers, last, number == 0)
