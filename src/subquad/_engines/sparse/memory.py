"""What a window remembers of the keys so far: the first visible ones, and the last ones, in constant memory.

    sinks    the first `sinks` visible keys, with their places in the sequence
    tail     the last keys, at least size - 1 of them, hidden ones included

Both lie in one buffer, sinks first, with room for more keys behind the tail, into which later calls write. A second
call that continues the same state finds the room taken and makes a copy, so a state is a value. A full buffer is
replaced by one with the keys that are still needed.

Axes: b batch and key heads, t keys of the tail, s sinks, m new keys, d width, e value width.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._calls.state import State, WritePermit
from subquad._torch_internals import has_numbers
from subquad.methods.window import Window

MIN_SPARE_KEYS = 64
MAX_SPARE_KEYS = 1024


@dataclass(frozen=True)
class Buffers:
    """Keys (b, room, d) and values (b, room, e) of sinks and tail, and room for more."""

    keys: Tensor
    values: Tensor
    keep: Tensor  # (b, room), True = visible; sinks that are also in the tail are hidden
    front: int  # sinks
    is_open: bool  # nothing is hidden

    @property
    def room(self) -> int:
        """Keys of the longest tail."""
        return self.keys.shape[1] - self.front

    def tokens(self, tail: int) -> "Tokens":
        """Return the sinks and a tail of this length, in place."""
        part = slice(0, self.front + tail)
        return Tokens(self.keys[:, part], self.values[:, part], None if self.is_open else self.keep[:, part])


@dataclass(frozen=True)
class Tokens:
    """Keys (b, m, d), values (b, m, e) and which of them are visible, (b, m); None if all are."""

    keys: Tensor
    values: Tensor
    keep: Tensor | None

    def followed_by(self, other: "Tokens") -> "Tokens":
        keep = None
        if self.keep is not None or other.keep is not None:
            keep = torch.cat([self.shown(), other.shown()], 1)
        return Tokens(torch.cat([self.keys, other.keys], 1), torch.cat([self.values, other.values], 1), keep)

    def shown(self) -> Tensor:
        """Return (b, m), True = visible."""
        return self.keys.new_ones(self.keys.shape[:2], dtype=torch.bool) if self.keep is None else self.keep


def folded(state: State, layout: Layout) -> tuple[Tokens, Tokens]:
    """Return the sinks that are not in the tail, and the tail."""

    def fold(x: Tensor) -> Tensor:
        return x.reshape(layout.rows, *x.shape[len(layout.batch) + 1 :])

    assert state.keys is not None and state.values is not None
    keys, values, places = (fold(x) for x in state.parts)
    tail = Tokens(fold(state.keys), fold(state.values), None if state.keep is None else fold(state.keep))
    before = (places >= 0) & (places < state.length - tail.keys.shape[1])
    if _all(before):
        return Tokens(keys, values, None), tail
    return Tokens(keys, values, before), tail


def held(state: State) -> tuple[Tokens, int]:
    """Return sinks and tail as they lie in the buffers of a state, and the number of sinks."""
    assert state.permit is not None and state.keys is not None
    buffers: Buffers = state.permit.prepared
    return buffers.tokens(state.keys.shape[-2]), buffers.front


def state_after(method: Window, call: Call, prefix: Tokens | None, seen: Tokens) -> State:
    """Return the state after a call.

    Args:
        method: The method.
        call: The call.
        prefix: The sinks of its state that precede the tail.
        seen: The tail of its state, and the new keys; visible are those of the last segment.
    """
    layout, before, last = call.layout, call.state, call.last_segment
    length = layout.keys + (0 if before is None else before.length)
    start = length - seen.keys.shape[1]  # the place of the first key of `seen`
    sinks = _sinks(method, before, prefix, seen, start, layout)
    kept = min(seen.keys.shape[1], method.reach - 1)
    permit = None
    if torch.compiler.is_compiling():  # A graph can hold neither a lock nor room for later calls.
        tail = seen.keys.shape[1] - kept
        keys, values, shown = seen.keys[:, tail:].clone(), seen.values[:, tail:].clone(), seen.shown()[:, tail:]
    else:
        permit = WritePermit(length)
        buffers = permit.prepared = _buffers(method, seen, kept, sinks, length - kept)
        own = slice(buffers.front, buffers.front + kept)
        keys, values, shown = buffers.keys[:, own], buffers.values[:, own], buffers.keep[:, own]
    return State(
        method, length, call.logit_scale, keys=layout.unfold(keys), values=layout.unfold(values),
        keep=None if seen.keep is None else layout.unfold(shown), parts=tuple(layout.unfold(x) for x in sinks),
        permit=permit, segment=None if last is None else layout.unfold(last),
    )  # fmt: skip


def _sinks(
    method: Window, before: State | None, prefix: Tokens | None, seen: Tokens, start: int, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys (b, s, d), values (b, s, e) and places (b, s) of the first visible keys; place -1: none."""
    b, device = seen.keys.shape[0], seen.keys.device
    places = torch.arange(start, start + seen.keys.shape[1], device=device).expand(b, -1)
    if prefix is not None and before is not None:
        old = before.parts[2].reshape(layout.rows, before.parts[2].shape[-1])
        seen, places = prefix.followed_by(seen), torch.cat([old, places], 1)
    count = min(method.sinks, places.shape[1])
    if count == 0:
        return seen.keys[:, :0], seen.values[:, :0], places[:, :0]
    shown = seen.shown()
    chosen = (~shown).int().argsort(dim=1, stable=True)[:, :count]  # visible keys first, in their order
    found = torch.where(shown.gather(1, chosen), places.gather(1, chosen), -1)
    keys, values = (x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1])) for x in (seen.keys, seen.values))
    return keys, values, found


def _buffers(method: Window, seen: Tokens, kept: int, sinks: tuple[Tensor, Tensor, Tensor], start: int) -> Buffers:
    """Return buffers with the sinks, the last `kept` keys, whose places begin at `start`, and spare room."""
    spare = max(MIN_SPARE_KEYS, min(method.reach, MAX_SPARE_KEYS, kept))
    first = seen.keys.shape[1] - kept
    shown = (sinks[2] >= 0) & (sinks[2] < start)

    def begun(front: Tensor, x: Tensor) -> Tensor:
        return torch.cat([front, x[:, first:], x.new_ones(x.shape[0], spare, *x.shape[2:])], 1)

    is_open = seen.keep is None and _all(shown)
    return Buffers(
        begun(sinks[0], seen.keys), begun(sinks[1], seen.values), begun(shown, seen.shown()), shown.shape[1], is_open
    )


def _all(flags: Tensor) -> bool:
    """Return whether all are known to be True; a recorded program does not know."""
    return not torch.compiler.is_compiling() and has_numbers(flags) and bool(flags.all())


def grown(state: State, layout: Layout, new: Tokens) -> State | None:
    """Return the state with a few more visible keys, written into its room; None if there is none, or it is taken."""
    count, permit = new.keys.shape[1], state.permit
    if permit is None or permit.prepared is None or state.keys is None or new.keep is not None:
        return None
    buffers: Buffers = permit.prepared
    tail = state.keys.shape[-2]
    if tail + count > buffers.room or not may_write(buffers) or not permit.claim(state.length, count):
        return None
    part = slice(buffers.front + tail, buffers.front + tail + count)
    buffers.keys[:, part], buffers.values[:, part] = new.keys, new.values
    return longer(state, layout, count)


def may_write(buffers: Buffers) -> bool:
    """Return whether torch lets this call write into buffers that may have been made in inference mode."""
    return torch.is_inference_mode_enabled() or not buffers.keys.is_inference()


def longer(state: State, layout: Layout, count: int) -> State:
    """Return the state whose tail has `count` more keys of its buffers."""
    assert state.permit is not None and state.keys is not None
    buffers: Buffers = state.permit.prepared
    tail = slice(buffers.front, buffers.front + state.keys.shape[-2] + count)
    keep = None if state.keep is None else layout.unfold(buffers.keep[:, tail])
    return replace(
        state, length=state.length + count, keys=layout.unfold(buffers.keys[:, tail]),
        values=layout.unfold(buffers.values[:, tail]), keep=keep,
    )  # fmt: skip
