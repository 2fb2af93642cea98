"""Windows over several ranks: each rank gets the keys next to its slice, and the first keys.

    | sinks of earlier ranks | keys before | own keys | keys after | sinks of later ranks |

The engine then computes the rows of the own slice. Keys after it, and sinks of later ranks, are needed only without
causality. The volume is that of the window, whatever the length; it comes from the neighbor alone unless slices are
shorter than the window.

Axes: b batch and key heads, n queries and m keys of this rank, d width, e value width.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._engines import run
from subquad.distributed.gathering import gathered
from subquad.distributed.peers import Peers, Transfer
from subquad.distributed.recorded import Exchange
from subquad.distributed.segments import Runs
from subquad.methods.window import Window


class Keys(NamedTuple):
    """Some keys in their order."""

    both: Tensor  # (b, m, d + e): keys and values
    keep: Tensor  # (b, m), True = may be seen
    runs: Tensor  # (b, m), the number of the segment

    def part(self, start: int, end: int) -> "Keys":
        return Keys(*(x[:, start:end] for x in self))


def attend(method: Window, call: Call, peers: Peers, runs: Runs | None) -> Tensor:
    """Return the output of this rank's queries (..., heads, n, e)."""
    call = call.factored()
    _, k, v = call.folded()
    keep = call.keep()
    shown = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if keep is None else keep
    numbers = torch.zeros(k.shape[:2], dtype=torch.long, device=k.device) if runs is None else runs.numbers
    own = Keys(torch.cat([k, v], -1), shown, numbers)
    reach = min(method.reach - 1, sum(peers.lengths))
    left, right = borders(own, peers, reach, reach_after=0 if call.is_causal else reach)
    earlier, later = sinks_of_others(own, peers, min(method.sinks, sum(peers.lengths)), reach, call.is_causal)
    parts = [earlier, left, own, right, later]
    both, shown, numbers = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    layout = call.layout
    key, value = (layout.unfold(x) for x in both.split([layout.width, layout.value_width], -1))
    has_masks = keep is not None or not bool(shown.all()) or peers.has_masks
    whole = Call.of(
        call.query, key, value, is_causal=call.is_causal, scale=call.logit_scale, enable_gqa=layout.group > 1,
        key_padding_mask=layout.unfold(shown) if has_masks else None,
    )._replace(
        segments=None if runs is None else numbers, first_row=earlier.keep.shape[1] + left.keep.shape[1],
        dtype=call.dtype, is_autocast=call.is_autocast,
    )  # fmt: skip
    output = run(method, whole).output
    return output[0] if call.is_headless and output.dim() > 2 else output
