"""Windows over several ranks: each rank gets the keys next to its slice, and the first keys.

    | sinks of earlier ranks | keys before | own keys | keys after | sinks of later ranks |

The engine then computes the rows of the own slice among these. Keys after it, and sinks of later ranks, are needed only
without causality. The volume is that of the window, whatever the length. Keys before and after come from the neighbor
alone, unless slices are shorter than the window.

Axes: b batch and key heads, n queries and m keys of this rank, d width, e value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.call import Call
from subquad._engines import run
from subquad.distributed.gathering import gathered
from subquad.distributed.peers import Peers
from subquad.distributed.recorded import Exchange
from subquad.distributed.segments import Runs
from subquad.methods.window import Window


class Keys(NamedTuple):
    """Some keys in their order."""

    tokens: Tensor  # (b, m, d + e): keys and values
    keep: Tensor  # (b, m), True = may be seen
    runs: Tensor  # (b, m), the number of the segment; -1 for keys that only fill a place


def attend(method: Window, call: Call, peers: Peers, runs: Runs | None) -> Tensor:
    """Return the output of this rank's queries (..., heads, n, e)."""
    q, k, v = call.folded()
    keep, shape = call.keep(), k.shape[:2]
    shown = torch.ones(shape, dtype=torch.bool, device=k.device) if keep is None else keep
    numbers = torch.zeros(shape, dtype=torch.long, device=k.device) if runs is None else runs.numbers
    own = Keys(torch.cat([k, v], -1), shown, numbers)
    total = sum(peers.lengths)
    border = Border(peers, min(method.reach - 1, total), call.is_causal)
    left, right = border.keys_of(own)
    parts, first_row = [left, own, right], left.keep.shape[1]
    if method.sinks:
        earlier, later = _sinks(own, border, min(method.sinks, total))
        parts, first_row = [earlier, *parts, later], first_row + earlier.keep.shape[1]
    tokens, shown, numbers = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    layout = call.layout
    key, value = (layout.unfold(x) for x in tokens.split([k.shape[-1], v.shape[-1]], -1))
    whole = Call.of(
        layout.unfold_query(q), key, value, is_causal=call.is_causal, scale=call.logit_scale,
        enable_gqa=layout.group > 1, key_padding_mask=None if bool(shown.all()) else layout.unfold(shown),
    )  # fmt: skip
    # A key that only fills a place has the number of the key before it, so that the numbers stay in order.
    segments = None if runs is None else numbers.cummax(1).values if numbers.shape[1] else numbers
    output = run(method, whole._replace(segments=segments, first_row=first_row)).output
    return call.unfolded(layout.fold_query(output))


class Border(NamedTuple):
    """Which keys of others a rank needs: up to `reach` before its own, and after them unless the call is causal."""

    peers: Peers
    reach: int
    is_causal: bool

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the positions, from first to behind the last, of the keys before and after a rank's own."""
        start, end = self.peers.starts[rank : rank + 2]
        after = end if self.is_causal else min(self.peers.starts[-1], end + self.reach)
        return [(max(0, start - self.reach), start), (end, after)]

    def messages(self) -> list[tuple[int, int, int, int, int]]:
        """Return sender, receiver, side and positions of everything that travels, in one order for all ranks."""
        found = []
        for receiver in range(self.peers.size):
            for side, (low, high) in enumerate(self.ranges(receiver)):
                for sender in range(self.peers.size):
                    start, end = self.peers.starts[sender : sender + 2]
                    if max(low, start) < min(high, end):
                        found.append((sender, receiver, side, max(low, start), min(high, end)))
        return found

    def keys_of(self, own: Keys) -> list[Keys]:
        """Return the keys before this rank's own, and those after them."""
        sides = [Travel(self).run(x) for x in (own.tokens, own.keep.to(torch.uint8), own.runs)]
        return [Keys(tokens, keep.bool(), runs) for tokens, keep, runs in zip(*sides, strict=True)]


class Travel(Exchange):
    """Keys go to the ranks that need them; their gradients come back and are summed in the order of the ranks."""

    like: Tensor

    def __init__(self, border: Border) -> None:
        self.border, self.peers = border, border.peers

    def forward(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        (own,) = tensors
        assert own is not None
        self.like = own.detach()
        sides = self._sides()
        sent, arriving = [], []
        for sender, receiver, side, low, high in self.border.messages():
            if sender == self.peers.rank:
                sent.append(self.peers.send(self._cut(own, low, high), receiver))
            elif receiver == self.peers.rank:
                place = self._cut(sides[side], low, high, side)
                arriving.append((place, self.peers.receive(place, sender)))
        for place, transfer in arriving:
            place.copy_(transfer.wait())
        for transfer in sent:
            transfer.wait()
        return tuple(sides)

    def backward(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        sides = [nothing if x is None else x for x, nothing in zip(grads, self._sides(), strict=True)]
        total = torch.zeros_like(self.like)
        sent, arriving = [], []
        for sender, receiver, side, low, high in self.border.messages():
            if receiver == self.peers.rank:
                sent.append(self.peers.send(self._cut(sides[side], low, high, side), sender))
            elif sender == self.peers.rank:
                place = self._cut(total, low, high)
                arriving.append((place, self.peers.receive(place, receiver)))
        for place, transfer in arriving:
            place += transfer.wait()
        for transfer in sent:
            transfer.wait()
        return (total,)

    def _sides(self) -> list[Tensor]:
        """Return zeros for the keys before and after this rank's own."""
        sizes = [high - low for low, high in self.border.ranges(self.peers.rank)]
        return [self.like.new_zeros(self.like.shape[0], size, *self.like.shape[2:]) for size in sizes]

    def _cut(self, tensor: Tensor, low: int, high: int, side: int | None = None) -> Tensor:
        """Return the tokens at some positions of the own slice, or of one side of it."""
        start = self.peers.start if side is None else self.border.ranges(self.peers.rank)[side][0]
        return tensor[:, low - start : high - start]


def _sinks(own: Keys, border: Border, count: int) -> tuple[Keys, Keys]:
    """Return the first visible keys of earlier ranks' last segments, and of later ranks' first ones.

    A row can only miss the sinks of the segment that begins or ends beyond the own slice. Keys that the rank has anyway
    are hidden.
    """
    peers = border.peers
    begins, ends = (_gathered_first(own, peers, count, is_last) for is_last in (False, True))
    (before, _), (_, after) = border.ranges(peers.rank)
    split = peers.rank * count
    earlier = ends.hidden(ends.places < before).part(0, split)
    later = begins.hidden(begins.places >= after).part(split + count, 0 if border.is_causal else peers.size * count)
    return earlier.keys, later.keys


class Candidates(NamedTuple):
    """The first visible keys of all ranks, `count` for each, with their positions."""

    keys: Keys
    places: Tensor  # (b, ranks * count)

    def hidden(self, stays: Tensor) -> "Candidates":
        tokens, keep, runs = self.keys
        return Candidates(Keys(tokens, keep & stays, torch.where(keep & stays, runs, -1)), self.places)

    def part(self, start: int, end: int) -> "Candidates":
        return Candidates(Keys(*(x[:, start:end] for x in self.keys)), self.places[:, start:end])


def _gathered_first(own: Keys, peers: Peers, count: int, is_last: bool) -> Candidates:
    """Return the first `count` visible keys of the last or the first segment of every rank."""
    tokens, keep, runs = own
    m = keep.shape[1]
    inside = keep & (runs == (runs[:, -1:] if is_last else runs[:, :1]))
    chosen = (~inside).int().argsort(dim=1, stable=True)[:, :count]  # visible keys first, in their order
    shown = inside.gather(1, chosen)
    room = count - min(count, m)
    found = (
        F.pad(tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[-1])), (0, 0, 0, room)),
        F.pad(shown, (0, room)),
        F.pad(torch.where(shown, runs.gather(1, chosen), -1), (0, room), value=-1),
        F.pad(chosen + peers.start, (0, room)),
    )
    equal = peers._replace(lengths=(count,) * peers.size)
    tokens, shown, runs, places = (gathered(x, equal) for x in found)
    return Candidates(Keys(tokens, shown, runs), places)
